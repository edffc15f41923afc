"""The PostgreSQL store and its database: table, rights, settings, URL."""

import logging
import re
import traceback
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count
from urllib.parse import quote

import psycopg
import pytest
from exchange import table
from postgresql import WITNESS, accepts_connections, assert_refused, refused
from server import free_port
from waiting import PATIENCE, in_threads, wait_until

from store import IdTaken, Plant, StoreUnavailable, masked, open_store, postgresql
from store.committer import Entry
from store.postgresql import Plants, connection
from store.postgresql.reasons import explain
from store.postgresql.table import CREATE

FERN = Plant(1, 'Fern')
REED = Plant(1, 'Reed')
MOSS = Plant(2, 'Moss', 'shade')
DENIED = 'the database does not permit it'
# Every character that could end a password early, in a URL or in libpq.
PASSWORD = "s3cr@:/?#%& +='\\é"

numbers = count()


@pytest.fixture(scope='session')
def database(database):
    """A server where a role needs a password, and others may not write to its log."""
    access = database.data / 'pg_hba.conf'
    sealed = 'host all sealed 127.0.0.1/32 scram-sha-256\n'
    access.write_text(sealed + access.read_text())
    literal = PASSWORD.replace("'", "''")
    database.execute(f"CREATE ROLE sealed LOGIN SUPERUSER PASSWORD '{literal}'")
    database.execute(
        'REVOKE EXECUTE ON FUNCTION pg_logical_emit_message'
        '(boolean, text, text, boolean) FROM PUBLIC'
    )
    database.configure('')
    sealed_url = database.url().replace('gardener', 'sealed')
    wait_until(lambda: not accepts_connections(sealed_url))
    return database


@pytest.fixture
def lonely(database):
    """The URL of a database without tables of other tests."""
    database.execute('DROP DATABASE IF EXISTS lonely WITH (FORCE)')
    database.execute('CREATE DATABASE lonely')
    return database.url().replace('/postgres', '/lonely')


@pytest.fixture
def made(database, url):
    """The URL of a store without plants whose table exists."""
    with open_store(url) as store:
        store.ping()
    return url


@pytest.fixture
def role(database):
    """Return a function that makes a role, and returns its URL."""

    def make(url, *grants, **settings):
        name = f'role_{next(numbers)}'
        database.execute(f'CREATE ROLE {name} LOGIN')
        for grant in grants:
            database.execute(f'GRANT {grant} TO {name}', url=url)
        for setting, value in settings.items():
            database.execute(f"ALTER ROLE {name} SET {setting} = '{value}'")
        return url.replace('gardener', name)

    return make


def uses(store):
    """Return the calls that a database may refuse."""
    return store.ping, partial(store.add, MOSS)


def role_of(url):
    """Return the role that a URL names."""
    return url.partition('://')[2].partition('@')[0]


def has_table(database, url):
    """Return whether the table exists."""
    return database.execute("SELECT to_regclass('plants')", url=url) != [(None,)]


# ---- the table


def test_first_uses_at_once_make_one_table(database):
    """Eight stores that first use a database at once make one table, no error."""
    for _ in range(5):
        url = database.new_url()
        with ExitStack() as opened:
            stores = [opened.enter_context(open_store(url)) for _ in range(8)]
            in_threads(*(lambda store=store: store.add(FERN) for store in stores))
        assert database.execute('TABLE plants', url=url) == [FERN]


RIGHTS = ['SELECT ON plants', 'INSERT ON plants', 'UPDATE (id) ON plants']


@pytest.mark.parametrize('missing', RIGHTS)
def test_role_needs_few_rights(made, role, missing):
    """A role needs the rights to select, insert and lock; it is refused without one."""
    with open_store(role(made, *RIGHTS)) as store:
        store.ping()
        assert store.add_many([FERN, FERN, FERN._replace(tag='')])[:2] == [True, False]
        with pytest.raises(IdTaken):
            store.add(REED)
        assert list(store) == [FERN]
    with open_store(role(made, *{*RIGHTS} - {missing})) as store:
        assert_refused(DENIED, store.ping, partial(store.add, FERN))


def test_table_is_made_by_no_reader(database, url, role):
    """A reader makes no table, nor a use with ``create=False`` or without rights."""
    with open_store(role(url)) as store:
        assert_refused(DENIED, store.ping)
    with open_store(url) as store, open_store(url, create=False) as other:
        assert list(store) == []
        every = *uses(other), partial(list, other), other.load
        assert_refused('there is no table plants', *every)
        store.load(wait=False)
        assert not has_table(database, url)
        store.load()
        assert has_table(database, url)
        assert other.add(FERN) is True
        # One that was dropped is not made again, by no new session either.
        database.execute('DROP TABLE plants', url=url)
        database.terminate_sessions()
        for _ in range(2):
            assert_refused(None, *uses(store), store.load)
        assert not has_table(database, url)


@pytest.mark.parametrize('columns', ['id int8 PRIMARY KEY, name text', 'id int'])
def test_table_of_others_is_left_alone(database, url, columns):
    """A table that lacks a column is refused, with the change that it needs."""
    database.execute(f'CREATE TABLE plants ({columns})', url=url)
    for create in True, False:
        with open_store(url, create=create) as store:
            details = assert_refused(None, *uses(store), partial(list, store))
            assert all('tag' in detail for detail in details)
    if 'name' in columns:
        database.execute('ALTER TABLE plants ADD tag text', url=url)
        with open_store(url) as store:
            assert store.add(MOSS) is True


def test_second_table_is_not_made(database, lonely, role, monkeypatch):
    """If the search_path no longer leads to the table, no other one is made."""
    url = role(lonely)
    name = role_of(url)
    database.execute(f'ALTER ROLE {name} SUPERUSER')
    for schema in 'other', 'third', '"a%sB"':
        database.execute(f'CREATE SCHEMA {schema}', url=url)

    def set_path(path):
        database.execute(f'ALTER ROLE {name} SET search_path = {path}')

    def add(plant, url=url):
        with open_store(url) as store:
            return store.add(plant)

    with open_store(url) as first:
        with psycopg.connect(url, autocommit=True) as other:
            other.execute('CREATE TEMP TABLE plants (id int, name text, tag text)')
            first.add(FERN)
        set_path('other')
        database.terminate_sessions()
        wait_until(lambda: not database.sessions())
        with pytest.raises(IdTaken):  # it names its table with the schema
            first.add(REED)
    for create in True, False:
        with open_store(url, create=create) as store:
            elsewhere = 'the search_path does not lead to one table plants'
            every = *uses(store), partial(list, store), store.load
            for detail in assert_refused(elsewhere, *every):
                assert 'public.plants' in detail
    assert not has_table(database, url)
    # The URL may name the schema, and so may an operator who makes the table.
    path = f'{url}?options=-csearch_path%3D'
    assert add(REED, f'{path}other') is True
    assert add(MOSS, f'{path}%22a%25sB%22') is True
    with open_store(f'{path}nowhere') as store:
        assert_refused(None, store.load)
    with monkeypatch.context() as patched:
        patched.setenv('PGOPTIONS', '-csearch_path=third')
        assert add(FERN._replace(name='Ivy')) is True
    database.execute('DROP TABLE third.plants', url=url)
    database.execute('CREATE TABLE third.plants (id int)', url=url)
    set_path('third, public')  # that of others is passed over
    assert add(FERN) is False
    set_path('other, public')
    with open_store(url) as store:
        two = 'the search_path does not lead to one table plants'
        for detail in assert_refused(two, store.ping, partial(list, store)):
            assert 'other.plants' in detail
    set_path('"a%sB"')
    with open_store(url) as store:
        assert store.add(MOSS) is False
        assert list(store) == [MOSS]
        store.ping()


LONG = ''.join(map(chr, range(0x4E00, 0x9000)))  # too long for an index page

TRIGGER = (  # its warning refuses no plant
    "CREATE FUNCTION act() RETURNS trigger AS $$BEGIN RAISE WARNING 'soon'; "
    "IF NEW.name = 'bad' THEN {}; END IF; RETURN NEW; END$$ LANGUAGE plpgsql; "
    'CREATE TRIGGER act BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()'
)
EVERY = TRIGGER.replace("IF NEW.name = 'bad' THEN {}; END IF; ", '{}; ')
POLICY = (
    'ALTER TABLE plants ENABLE ROW LEVEL SECURITY; '
    'CREATE POLICY reading ON plants FOR SELECT USING (true); '
    'CREATE POLICY locking ON plants FOR UPDATE USING (true); '
    "CREATE POLICY adding ON plants FOR INSERT WITH CHECK (name <> 'bad')"
)
RULE = 'a rule of the table plants does not permit it'
BUSY = 'the database is busy with other changes of the same plants'

# How a table refuses a plant: the statements, the name of the plant, the reason.
RULES = {
    'check': ("ALTER TABLE plants ADD CHECK (name <> 'bad')", 'bad', RULE),
    'unique': (
        'ALTER TABLE plants ADD UNIQUE (name), ADD CHECK (id > 0)',
        *('Fern1', RULE),
    ),
    'length': ('ALTER TABLE plants ALTER name TYPE varchar(5)', 'Orchid', RULE),
    'index': ('CREATE INDEX ON plants (name)', LONG, RULE),
    'trigger': (TRIGGER.format("RAISE 'no'"), 'bad', RULE),
    # Refused only after many slow attempts, which take no time of others.
    'busy': (
        TRIGGER.format("PERFORM pg_sleep(0.07); RAISE 'no' USING ERRCODE = '40001'"),
        *('bad', BUSY),
    ),
    'policy': (POLICY, 'bad', DENIED),
    'view': (
        'ALTER TABLE plants RENAME TO rows; CREATE VIEW plants AS '
        "SELECT * FROM rows WHERE name <> 'bad' WITH CHECK OPTION",
        *('bad', RULE),
    ),
}


@table('statements, name, reason', RULES)
def test_plant_that_breaks_a_rule_is_refused_alone(
    database, made, role, statements, name, reason
):
    """Of a batch only the plant that breaks a rule is refused, not even its rival."""
    database.execute(statements, url=made)
    bad = Plant(4, name)
    good = [Plant(id, f'Fern{id}') for id in range(1, 9)]
    url = role(made, *RIGHTS)
    with open_store(url) as store:
        store.ping()  # a rule of an empty table is no reason to take no plant
        with refused(reason):
            store.add_many([*good[:3], bad, *good[3:]])
        assert store.add_many(good) == [False] * 8

        # Adds that wait together form one batch, some with a bad plant in it.
        def add_all(start, name):
            for id in range(start, start + 3):
                with pytest.raises(StoreUnavailable) if name else nullcontext():
                    assert store.add(Plant(id, name or str(id))) is True

        crowd = [(100 * at, '') for at in range(1, 6)] + [(600, name)]
        in_threads(*(partial(add_all, *pair) for pair in crowd))
    with open_store(url) as store:
        store.ping()


UNFIT = 'the table plants is not as the store needs it'
NO_TRIGGER = 'DROP TRIGGER act ON plants'
PARTS = (
    'ALTER TABLE plants RENAME TO part; CREATE TABLE plants (LIKE part INCLUDING ALL) '
    'PARTITION BY RANGE (id); GRANT ALL ON plants TO PUBLIC'
)
ATTACH = 'ALTER TABLE plants ATTACH PARTITION part FOR VALUES FROM (-99) TO ({})'

# What a table then refuses: every plant. The statements that do it, the reason, and the
# statement that undoes it.
ALL_REFUSED = {
    'column': (
        "ALTER TABLE plants ADD note text NOT NULL DEFAULT ''; "
        'ALTER TABLE plants ALTER note DROP DEFAULT',
        *(RULE, 'ALTER TABLE plants DROP note'),
    ),
    'check': (
        'ALTER TABLE plants ADD CONSTRAINT it CHECK (false) NOT VALID',
        *(RULE, 'ALTER TABLE plants DROP CONSTRAINT it'),
    ),
    'function': (
        EVERY.format('INSERT INTO missing VALUES (1)'),
        *(UNFIT, NO_TRIGGER),
    ),
    'hidden': (EVERY.format('RETURN NULL'), None, NO_TRIGGER),
    'policy': (
        POLICY.replace("name <> 'bad'", 'false'),
        *(DENIED, 'ALTER TABLE plants DISABLE ROW LEVEL SECURITY'),
    ),
    'partition': (
        f'{PARTS}; {ATTACH.format(2)}',
        *(RULE, 'CREATE TABLE more PARTITION OF plants FOR VALUES FROM (2) TO (999)'),
    ),
}


@table('change, reason, undo', ALL_REFUSED)
def test_ping_tells_what_every_add_is_answered(
    database, made, role, monkeypatch, change, reason, undo
):
    """If a table refuses every plant a ping says so, and that it takes them again."""
    monkeypatch.setattr(postgresql, 'PROBE_EVERY', 0)
    with open_store(role(made, *RIGHTS)) as store:
        store.add(FERN)
        store.ping()
        database.execute(change, url=made)
        assert_refused(reason, *reversed(uses(store)))
        monkeypatch.setattr(postgresql, 'PROBE_EVERY', PATIENCE)
        assert_refused(reason, store.ping)  # also between two probes
        monkeypatch.setattr(postgresql, 'PROBE_EVERY', 0)
        database.execute(undo, url=made)
        for _ in range(10):
            store.ping()
        assert list(store) == [FERN]
        assert store.add(MOSS) is True


def test_plants_that_a_policy_hides_are_missed(database, made, role):
    """A role that is not shown every plant cannot read a part of them."""
    database.execute(
        "INSERT INTO plants VALUES (1, 'Fern'); "
        'ALTER TABLE plants ENABLE ROW LEVEL SECURITY; '
        "CREATE POLICY hiding ON plants USING (name <> 'Fern')",
        url=made,
    )
    with open_store(role(made, *RIGHTS)) as store:
        assert_refused(None, partial(store.add, FERN), partial(list, store))
    with open_store(made) as store:  # as its owner, who is under no policy
        assert store.add(FERN) is False


@pytest.mark.parametrize(
    'rule', ['UNIQUE (name)', 'CHECK (id BETWEEN 1 AND 200)', "CHECK (name = 'Fern')"]
)
def test_ping_finds_an_id_that_no_rule_forbids(database, made, rule):
    """A ping works for other unique columns, and if not every id is allowed."""
    database.execute(f'ALTER TABLE plants ADD {rule}', url=made)
    with open_store(made) as store:
        store.ping()
        store.add(Plant(2**63 - 1 if 'name' in rule else 1, 'Fern'))
    with open_store(made) as store:
        store.ping()


NO_KEY = 'ALTER TABLE plants DROP CONSTRAINT plants_pkey'
UNFIT_TABLES = {
    'not unique': NO_KEY,
    'no tag': 'ALTER TABLE plants DROP tag',
    'no name': 'ALTER TABLE plants RENAME name TO title',
    'not unique alone': f'{NO_KEY}, ADD part int, ADD PRIMARY KEY (id, part)',
    'cut': EVERY.format('NEW.name := left(NEW.name, 20)'),
    'rule': 'CREATE RULE it AS ON INSERT TO plants DO INSTEAD NOTHING',
    'generated': 'ALTER TABLE plants DROP tag, '
    "ADD tag text GENERATED ALWAYS AS ('x') STORED",
}


@pytest.mark.parametrize('change', UNFIT_TABLES.values(), ids=UNFIT_TABLES)
def test_table_that_cannot_keep_plants_is_refused(database, made, change):
    """A table that has no unique id, lacks a column or alters plants is refused."""
    database.execute(change, url=made)
    with open_store(made) as store, pytest.raises(StoreUnavailable):
        store.ping()
    assert database.execute('TABLE plants', url=made) == []


SENT = 'a secret'  # a traceback shows the lines of this module


def test_what_a_client_sent_is_in_no_error(database, made):
    """An error names the constraint that a plant broke, and nothing of the plant."""
    change = "ALTER TABLE plants ADD CONSTRAINT dry CHECK (tag <> 'wet')"
    database.execute(change, url=made)
    with open_store(made) as store, refused(RULE) as caught:
        store.add(Plant(5, SENT, 'wet'))
    assert SENT not in ''.join(traceback.format_exception(caught.value))
    assert 'SQLSTATE 23514' in caught.value.detail
    assert 'plants, dry' in caught.value.detail
    database.execute(TRIGGER.format(r"RAISE E'a\nb\x1b[2J'"), url=made)
    with open_store(made) as store, refused(RULE) as caught:
        store.add(Plant(5, 'bad'))
    assert caught.value.detail.startswith(r'a b\u001b[2J (SQLSTATE P0001')


# What no server of these tests says: SQLSTATE, words, meaning, what is tried again.
SAID = [
    ('40003', 'who knows', 'the database is busy with other changes', 'batch'),
    ('', 'remaining connection slots are reserved', 'the database allows no more', '-'),
    ('25006', 'cannot execute INSERT', 'the database is read-only', 'connect'),
    ('', 'the database system is in recovery', 'the database is shutting down', '-'),
    # As libpq says that an encrypted connection is lost.
    ('', 'SSL SYSCALL error: EOF', 'there is no connection to the data', '-'),
]


@pytest.mark.parametrize(('sqlstate', 'words', 'reason', 'retry'), SAID)
def test_meaning_of_an_error(sqlstate, words, reason, retry):
    """An error has the reason that an operator acts on, and is tried again or not."""
    kind = psycopg.errors.lookup(sqlstate) if sqlstate else psycopg.OperationalError
    found = explain(kind(f'{words} S3cret'), 'store', 'S3cret')
    assert found.detail == f'{words} ***'
    assert found.reason.startswith(reason)
    assert found.retry == retry


def test_batch_has_one_deadline(database, made, monkeypatch):
    """Plants for which no time is left are refused, too: nothing is known of them."""
    database.execute(TRIGGER.format("PERFORM pg_sleep(0.2); RAISE 'no'"), url=made)
    monkeypatch.setattr(postgresql, 'ANSWER_WITHIN', 0.5)
    with open_store(made) as store:
        plants = Plants(store._target)
        batch = [Entry(Plant(id, 'bad'), 1) for id in range(9)]
        plants.append(batch)()
        plants.close()
    assert all(entry.error for entry in batch)
    assert batch[0].error.reason == RULE
    assert batch[-1].error.reason == 'the database did not answer in time'


ALTERED = 'name TYPE varchar(500)', 'id TYPE numeric', 'tag TYPE text, ADD note text'


@pytest.mark.parametrize('change', ALTERED)
def test_table_may_have_more_columns(database, url, change):
    """A table may have more columns, in any order, and be altered while it is open."""
    database.execute(
        f'{CREATE}; '
        'ALTER TABLE plants ADD at timestamptz DEFAULT now(), ALTER tag TYPE varchar, '
        'DROP name, ADD name text COLLATE "C", DROP id, ADD id int8 UNIQUE',
        url=url,
    )
    with open_store(url) as store:

        def use(first):
            for id in range(first, first + 9):  # often enough to prepare statements
                assert store.add(Plant(id, 'Fern', 'wet')) is True
                assert store.add(Plant(id, 'Fern', 'wet')) is False
                with pytest.raises(IdTaken):
                    store.add(Plant(id, 'Moss', 'wet'))

        use(1)
        database.execute(f'ALTER TABLE plants ALTER {change}', url=url)
        use(101)
        assert sorted(store)[0] == Plant(1, 'Fern', 'wet')


def test_few_statements_are_prepared(database, made):
    """A session prepares few statements, whatever the sizes of batches and ids."""
    prepared = WITNESS.format('(SELECT count(*) FROM pg_prepared_statements)')
    database.execute(prepared, url=made)
    with open_store(made) as store:
        for size in range(1, 15):
            for first in (0, 10**5, 10**10):
                for _ in range(6):
                    store.add_many([Plant(first + n, 'Fern') for n in range(size)])
        store.add(Plant(-1, 'Fern'))
    ((most,),) = database.execute('SELECT max(seen::int) FROM seen', url=made)
    assert 1 <= most <= 3


@pytest.mark.parametrize('encoding', ['LATIN1', 'SQL_ASCII'])
def test_database_must_be_utf8(database, encoding):
    """A database whose encoding cannot hold every text is refused."""
    name = encoding.lower()
    database.execute(
        f"CREATE DATABASE {name} TEMPLATE template0 ENCODING {encoding} LOCALE 'C'"
    )
    url = database.url().replace('/postgres', f'/{name}')
    with open_store(url) as store:
        reason = 'the database is not as the store needs it'
        assert_refused(reason, store.ping, partial(list, store))
    assert not has_table(database, url)


# ---- settings of the role


GIVEN = {  # to a role
    'client_encoding': 'latin1',
    'client_min_messages': 'error',
    'default_transaction_isolation': 'serializable',
    'idle_session_timeout': '100ms',
    'lock_timeout': '0',
    'statement_timeout': '100ms',
    'synchronous_commit': 'local',
}
USED = {
    'client_encoding': 'UTF8',
    'client_min_messages': 'warning',
    'transaction_isolation': 'read committed',
    'lock_timeout': f'{1000 * connection.LOCK_WITHIN:.0f}ms',
    'statement_timeout': f'{connection.STATEMENT_WITHIN}s',
    'synchronous_commit': 'on',
}


def test_settings_of_the_role_are_corrected(database, made, role):
    """What an acknowledgement or a list needs holds, whatever the role's settings."""
    seen = ", ',', ".join(f"current_setting('{it}')" for it in USED)
    database.execute(WITNESS.format(f'concat({seen})'), url=made)
    plants = [Plant(id, 'Fern' * 100) for id in range(20_000)]
    url = role(made, *RIGHTS, 'ALL ON seen', **GIVEN) + '&client_encoding=latin1'
    with open_store(url) as store:
        store.add_many(plants)
        assert store.add(MOSS._replace(id=-1, tag=None)) is True
        assert sorted(store) == [Plant(-1, 'Moss'), *plants]
    seen = database.execute('SELECT DISTINCT seen FROM seen', url=made)
    assert seen == [(','.join(USED.values()),)]
    database.execute('TRUNCATE seen', url=made)
    safer = {'synchronous_commit': 'remote_apply'}
    with open_store(role(made, *RIGHTS, 'ALL ON seen', **safer)) as store:
        store.add(Plant(-2, 'Fern'))
    ((seen,),) = database.execute('TABLE seen', url=made)
    assert 'remote_apply' in seen


def test_read_only_role_is_refused(made, role):
    """A role whose transactions are read-only by default is refused for that reason."""
    url = role(made, *RIGHTS, default_transaction_read_only='on')
    for more in ('', '&target_session_attrs=read-write'):
        with open_store(url + more) as store:
            assert_refused('the database is read-only', *uses(store))
            assert list(store) == []


def test_one_connection_is_enough(database, made, role):
    """If the role may have only one connection, all adds go through it."""
    url = role(made, *RIGHTS)
    database.execute(f'ALTER ROLE {role_of(url)} CONNECTION LIMIT 1')
    with open_store(url) as store:

        def add_all(start):
            for id in range(start, start + 20):
                assert store.add(Plant(id, 'Fern')) is True
                store.ping()

        in_threads(*(lambda at=at: add_all(100 * at) for at in range(1, 9)))
        with open_store(url) as other:
            reads = partial(list, other)
            details = assert_refused(FULL, partial(other.add, MOSS), reads)
            assert all('too many connections' in detail for detail in details)


AWAY = 'there is no connection to the database'
LOGIN = 'the database refuses the login'
FULL = 'the database allows no more connections'
LOGINS = {
    'connect': ('REVOKE CONNECT ON DATABASE lonely FROM PUBLIC', LOGIN),
    'closed': ('ALTER DATABASE lonely ALLOW_CONNECTIONS false', LOGIN),
    'limit': ('ALTER DATABASE lonely CONNECTION LIMIT 0', FULL),
}


@table('change, reason', LOGINS)
def test_refused_login_is_told(database, lonely, role, change, reason):
    """A refused login has its reason."""
    url = role(lonely)
    database.execute(change.format(role=role_of(url)))
    with open_store(url) as store:
        assert_refused(reason, *uses(store), store.load)


# ---- the URL


def test_forms_of_a_url(database, lonely):
    """A password may have any character, escaped; a Unix socket may be the host."""
    escaped = quote(PASSWORD, safe='')
    at = f'127.0.0.1:{database.port}/lonely'
    directory = quote(str(database.directory), safe='')
    for url in (
        f'postgresql://sealed:{escaped}@{at}',
        f'postgres://sealed@{at}?password={escaped}',
        f'postgresql://{at}?user=sealed&password={escaped}',
        f'postgresql://gardener@{directory}:{database.port}/lonely',
        f'postgresql:///lonely?user=gardener&host={directory}&port={database.port}',
        f'{lonely.replace("127.0.0.1", "missing.invalid")}?hostaddr=127.0.0.1',
    ):
        with open_store(url) as store:
            store.ping()
            assert PASSWORD not in masked(url) + repr(store)
            assert escaped not in masked(url) + repr(store)


NO_HOST = 'no host takes plants'
# What is replaced in a URL, by what; the reason, and a part of the detail.
WRONG_URLS = {
    'password': ('sealed:', 'sealed:not-', LOGIN, 'authentication'),
    'database': (
        *('/postgres[?]', '/nowhere?', LOGIN),
        'database "nowhere" does not exist',
    ),
    'name': ('127.0.0.1', 'host.invalid', AWAY, 'resolve'),
    'hosts': ('$', '&host=::1,127.0.0.1&port={port}', AWAY, '::1:'),
    'kinds': ('@(.*)/postgres', r'@x.invalid,\1/nowhere', NO_HOST, 'nowhere'),
    'addresses': (
        *('@[^/]*(.*)', r'@\1&hostaddr=127.0.0.1,127.0.0.2&port={port}'),
        *(AWAY, 'refused'),
    ),
    'label': ('127.0.0.1', 'a' * 64 + '.b', AWAY, 'label'),
    'socket': ('$', '&host=%2Fmissing', AWAY, 'No such file'),
    'number': ('$', '&keepalives_idle=soon', AWAY, 'keepalives_idle'),
    'ssl': ('$', '&sslmode=require', LOGIN, 'SSL'),
}


@table('old, new, reason, detail', WRONG_URLS)
def test_connection_error_shows_no_password(database, old, new, reason, detail, caplog):
    """A connection error comes in time, with its reason, and never the password."""
    escaped = quote(PASSWORD, safe='')
    caplog.set_level(logging.DEBUG)
    at = f'127.0.0.1:{database.port}/postgres?application_name=it'
    url = f'postgresql://sealed:{escaped}@{at}'
    with open_store(re.sub(old, new.format(port=free_port()), url)) as store:
        with refused(reason) as caught:
            store.add(FERN)
        assert detail in caught.value.detail
        shown = [''.join(traceback.format_exception(caught.value)), caplog.text]
        error = caught.value
        while error is not None:
            shown += [str(error), repr(error), repr(error.args), repr(vars(error))]
            error = error.__cause__ or error.__context__
    for form in (PASSWORD, escaped):
        assert form not in ''.join(shown)


def test_host_that_is_not_there_delays_no_add(database, lonely):
    """The next host is used; if none is there, the words name each."""
    closed = free_port()
    hosts = f'missing.invalid:1,[::1]:{closed},localhost:'
    url = lonely.replace('127.0.0.1:', hosts)
    with open_store(url) as store:
        store.add(FERN)
    url = url.replace(f':{database.port}', f':{closed}')
    with open_store(url) as store, refused(AWAY) as caught:
        store.add(MOSS)
    for name in 'missing.invalid', '::1', 'localhost':
        assert name in caught.value.detail


UNKNOWN = {
    'pgbouncer=true': 'pgbouncer',
    'schema=public': 'schema',
    'sslmode=prefer&supa=base-pooler.x': 'supa',
    'options=endpoint=ep-1': 'options',
    'password=S3cret&Hidden=1': 'parameter',
}


@table('query, name', {query: (query, name) for query, name in UNKNOWN.items()})
def test_parameter_that_libpq_does_not_know_is_named(query, name):
    """The start is refused with the name of the parameter, and nothing of a value."""
    with pytest.raises(ValueError, match=rf'remove .*\b{name}\b') as caught:
        open_store(f' postgresql://me:S3cret@db.example/plants?{query}\n')
    assert not re.search('(?i)s3cret|hidden|ep-1|base-pooler', str(caught.value))
