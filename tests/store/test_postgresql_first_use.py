"""The PostgreSQL store and its database: table, rights, settings, URL."""

import logging
import math
import re
import socket
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from itertools import count
from urllib.parse import quote

import psycopg
import pytest
from postgresql import accepts_connections, refused
from server import free_port

from store import IdTaken, Plant, StoreUnavailable, masked, open_store, postgresql
from store.base import BATCH_CHARACTERS
from store.postgresql.connection import LOCK_WITHIN, STATEMENT_WITHIN
from store.postgresql.pool import RETRY_AFTER
from store.testing.waiting import PATIENCE, in_threads, wait_until

FERN = Plant(1, 'Fern')
MOSS = Plant(2, 'Moss', 'shade')
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
        _, has_schema, schema = url.rpartition('%3D')
        if has_schema:
            database.execute(f'GRANT USAGE ON SCHEMA {schema} TO {name}')
        for grant in grants:
            database.execute(f'GRANT {grant} TO {name}', url=url)
        for setting, value in settings.items():
            database.execute(f"ALTER ROLE {name} SET {setting} = '{value}'")
        return url.replace('gardener', name)

    return make


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
        assert store.add(FERN) is False
        with pytest.raises(IdTaken):
            store.add(FERN._replace(name='Moss'))
        assert list(store) == [FERN]
    rights = [right for right in RIGHTS if right != missing]
    with open_store(role(made, *rights)) as store:
        for use in (store.ping, lambda: store.add(FERN)):
            with refused('the database does not permit it'):
                use()


def test_missing_right_to_make_the_table(database, url, role):
    """Without the table and the right to make it, the store is not ready."""
    with open_store(role(url)) as store, refused('the database does not permit it'):
        store.ping()


def test_create_never_makes_no_table(database, url):
    """With ``create='never'`` a missing table is an error; readers never make one."""
    with open_store(url) as store:
        assert list(store) == []
        store.check_opening()
    with open_store(url, create='never') as store:
        for use in (store.ping, lambda: store.add(FERN), lambda: list(store)):
            with refused('there is no table plants'):
                use()
        assert not has_table(database, url)
        with open_store(url) as maker:
            maker.ping()
        time.sleep(RETRY_AFTER)
        assert store.add(FERN) is True


def test_dropped_table_is_not_made_again(database, made):
    """A table that was dropped under an open store is not made again."""
    with open_store(made) as store:
        store.add(FERN)
        database.execute('DROP TABLE plants', url=made)
        database.terminate_sessions()  # a new one must not make it either
        for use in (lambda: store.add(MOSS), store.ping):
            with refused('there is no table plants'):
                use()
        assert not has_table(database, made)


@pytest.mark.parametrize(
    'columns',
    [
        'id bigint, name text, tag text',
        'id bigint PRIMARY KEY, name text',
        'id bigint PRIMARY KEY, title text, tag text',
        'id bigint, part int, name text, tag text, PRIMARY KEY (id, part)',
    ],
)
def test_unsuitable_table_is_refused(database, url, columns):
    """A table without a unique id, or without a column, is refused at once."""
    database.execute(f'CREATE TABLE plants ({columns})', url=url)
    with open_store(url) as store:
        for use in (store.ping, lambda: store.add(FERN)):
            with refused('the table plants is not as the store needs it'):
                use()
    assert database.execute('TABLE plants', url=url) == []


def test_table_may_have_more_columns(database, url):
    """A table may have more columns, in any order."""
    database.execute(
        'CREATE TABLE plants (at timestamptz DEFAULT now(), tag varchar, note text, '
        'name text COLLATE "C", id int8 UNIQUE)',
        url=url,
    )
    with open_store(url) as store:
        assert store.add_many([FERN, MOSS]) == [True, True]
        assert store.add_many([FERN, MOSS]) == [False, False]
        assert sorted(store) == [FERN, MOSS]


@pytest.fixture
def paths(database, lonely):
    """A function that sets the search_path of a role, and the URL of the role."""
    name = f'role_{next(numbers)}'
    database.execute(f'CREATE ROLE {name} LOGIN SUPERUSER')

    def set_path(path):
        database.execute(f'ALTER ROLE {name} SET search_path = {path}')

    return set_path, lonely.replace('gardener', name)


def test_second_table_is_not_made(database, paths):
    """If the search_path no longer leads to the table, no other one is made."""
    set_path, url = paths
    database.execute('CREATE SCHEMA other; CREATE SCHEMA "a %sB"', url=url)
    with open_store(url) as first:
        first.add(FERN)
        set_path('other')
        database.terminate_sessions()
        with pytest.raises(IdTaken):  # it names its table with the schema
            first.add(FERN._replace(name='Moss'))
    for create in 'always', 'first', 'never':
        with open_store(url, create=create) as store:
            for use in store.ping, lambda: store.add(FERN), lambda: list(store):
                with pytest.raises(StoreUnavailable) as caught:
                    use()
                assert 'does not lead to the table' in str(caught.value)
                time.sleep(RETRY_AFTER)
            with pytest.raises(
                StoreUnavailable, match=r'public\.plants.* other\.plants'
            ):
                store.check_opening()
    assert not has_table(database, url)
    # The URL may name the schema, and so may an operator who makes the table.
    with open_store(f'{url}?options=-csearch_path%3Dother') as store:
        assert store.add(FERN._replace(name='Moss')) is True
    set_path('other, public')
    with open_store(url) as store:
        for use in store.ping, lambda: list(store):
            with refused('the search_path leads to two tables plants') as caught:
                use()
    assert 'other.plants and public.plants' in caught.value.detail
    database.execute('ALTER TABLE other.plants SET SCHEMA "a %sB"', url=url)
    set_path('"a %sB"')
    with open_store(url) as store:
        assert store.add(FERN._replace(name='Moss')) is False
        assert list(store) == [FERN._replace(name='Moss')]
        store.ping()


LONG = ''.join(map(chr, range(0x4E00, 0x9000)))  # too long for an index page

TRIGGER = (
    "CREATE FUNCTION act() RETURNS trigger AS $$BEGIN IF NEW.name = 'bad' THEN {}; "
    'END IF; RETURN NEW; END$$ LANGUAGE plpgsql; CREATE TRIGGER act BEFORE INSERT '
    'ON plants FOR EACH ROW EXECUTE FUNCTION act()'
)
POLICY = (
    'ALTER TABLE plants ENABLE ROW LEVEL SECURITY; '
    'CREATE POLICY reading ON plants FOR SELECT USING (true); '
    'CREATE POLICY locking ON plants FOR UPDATE USING (true); '
    "CREATE POLICY adding ON plants FOR INSERT WITH CHECK (name <> 'bad')"
)
RULE = 'a rule of the table plants does not permit it'

# How a table refuses a plant: the statements, the name of the plant, the reason.
RULES = {
    'check': ("ALTER TABLE plants ADD CHECK (name <> 'bad')", 'bad', RULE),
    'length': ('ALTER TABLE plants ALTER name TYPE varchar(5)', 'Orchid', RULE),
    'index': ('CREATE INDEX ON plants (name)', LONG, RULE),
    'trigger': (TRIGGER.format("RAISE 'no'"), 'bad', RULE),
    'own code': (
        TRIGGER.format("RAISE 'no' USING ERRCODE = 'ZZ123'"),
        'bad',
        'the database refuses it (ZZ123)',
    ),
    'busy': (
        TRIGGER.format("RAISE 'no' USING ERRCODE = '40001'"),
        'bad',
        'the database is busy with other changes of the same plants',
    ),
    'policy': (POLICY, 'bad', 'the database does not permit it'),
    'view': (
        'ALTER TABLE plants RENAME TO rows; CREATE VIEW plants AS '
        "SELECT * FROM rows WHERE name <> 'bad' WITH CHECK OPTION",
        'bad',
        RULE,
    ),
}


@pytest.mark.parametrize('rule', RULES)
def test_plant_that_breaks_a_rule_is_refused_alone(database, made, role, rule):
    """Of a batch only the plant that breaks a rule is refused, not even its rival."""
    statements, name, reason = RULES[rule]
    database.execute(statements, url=made)
    bad = Plant(4, name)
    good = [Plant(id, 'Fern') for id in range(8)]
    with open_store(role(made, *RIGHTS)) as store:
        with refused(reason):
            store.add_many([*good[:4], bad, *good[4:]])
        assert store.add_many(good) == [False] * 8
        refusals = []

        # Adds that wait together form one batch, some with a bad plant in it.
        def add_all(start, name):
            for id in range(start, start + 5):
                try:
                    assert store.add(Plant(id, name)) is True
                except StoreUnavailable:
                    refusals.append(name)

        crowd = [(100 * at, 'Moss') for at in range(1, 6)] + [(600, name)]
        in_threads(*(lambda pair=pair: add_all(*pair) for pair in crowd))
        assert refusals == [name] * 5


PART = 'the table plants has no partition for the plant'
UNFIT = 'the table plants is not as the store needs it'
EVERY = TRIGGER.replace("IF NEW.name = 'bad' THEN {}; END IF; ", '{}; ')
PARTS = (
    'DROP TABLE plants; CREATE TABLE plants (id bigint PRIMARY KEY, name text, '
    'tag text) PARTITION BY RANGE (id); CREATE TABLE part PARTITION OF plants '
    'FOR VALUES FROM (-99) TO (2)'
)

# What a table then refuses: every plant. The statements before, those that do it, the
# reason, and those that undo it.
ALL_REFUSED = {
    'column': (
        '',
        "ALTER TABLE plants ADD note text NOT NULL DEFAULT ''; "
        'ALTER TABLE plants ALTER note DROP DEFAULT',
        *(UNFIT, 'ALTER TABLE plants DROP note'),
    ),
    'check': (
        '',
        'ALTER TABLE plants ADD CONSTRAINT it CHECK (false) NOT VALID',
        *(RULE, 'ALTER TABLE plants DROP CONSTRAINT it'),
    ),
    'trigger': ('', EVERY.format("RAISE 'no'"), RULE, 'DROP TRIGGER act ON plants'),
    'deferred': (
        '',
        EVERY.format("RAISE 'no'")
        .replace('CREATE TRIGGER', 'CREATE CONSTRAINT TRIGGER')
        .replace(
            'BEFORE INSERT ON plants',
            'AFTER INSERT ON plants DEFERRABLE INITIALLY DEFERRED',
        ),
        *(RULE, 'DROP TRIGGER act ON plants'),
    ),
    'function': (
        '',
        EVERY.format('INSERT INTO missing VALUES (1)'),
        *('a trigger of the table plants fails', 'DROP TRIGGER act ON plants'),
    ),
    'hidden': (
        '',
        EVERY.format('RETURN NULL'),
        'the database is busy with other changes of the same plants',
        'DROP TRIGGER act ON plants',
    ),
    'policy': (
        POLICY,
        'DROP POLICY adding ON plants',
        *(
            'the database does not permit it',
            'ALTER TABLE plants DISABLE ROW LEVEL SECURITY',
        ),
    ),
    'key': (
        '',
        'ALTER TABLE plants DROP CONSTRAINT plants_pkey',
        *(UNFIT, 'ALTER TABLE plants ADD PRIMARY KEY (id)'),
    ),
    'name': (
        '',
        'ALTER TABLE plants RENAME name TO title',
        *(UNFIT, 'ALTER TABLE plants RENAME title TO name'),
    ),
    'partition': (
        PARTS,
        'SELECT 1',
        *(PART, 'CREATE TABLE more PARTITION OF plants FOR VALUES FROM (2) TO (999)'),
    ),
    'detached': (
        PARTS.replace('(2)', '(999)'),
        'ALTER TABLE plants DETACH PARTITION part',
        PART,
        'ALTER TABLE plants ATTACH PARTITION part FOR VALUES FROM (-99) TO (999)',
    ),
}


@pytest.mark.parametrize('case', ALL_REFUSED)
def test_ping_tells_what_every_add_is_answered(database, made, role, case, monkeypatch):
    """If a table refuses every plant a ping says so, and that it takes them again."""
    monkeypatch.setattr(postgresql, 'PROBE_EVERY', 0)
    before, change, reason, undo = ALL_REFUSED[case]
    database.execute(before or 'SELECT 1', url=made)
    with open_store(role(made, *RIGHTS)) as store:
        store.add(FERN)
        if case != 'partition':
            store.ping()
        database.execute(change, url=made)
        for use in (lambda: store.add(MOSS), store.ping):
            with refused(reason):
                use()
        database.execute(undo, url=made)
        for _ in range(10):
            store.ping()
        assert list(store) == [FERN]
        assert store.add(MOSS) is True


@pytest.mark.parametrize(
    'rule', [rule for rule in RULES if rule not in ('view', 'busy', 'index')]
)
def test_empty_table_with_a_rule_is_ready(database, made, role, rule):
    """A rule of an empty table is no reason to take no plant, nor a unique name."""
    database.execute(RULES[rule][0], url=made)
    database.execute(
        'ALTER TABLE plants ADD UNIQUE (name), ADD CHECK (id > 0)', url=made
    )
    database.execute("ALTER TABLE plants ADD CHECK (tag <> 'shade')", url=made)
    url = role(made, *RIGHTS)
    with open_store(url) as store:
        store.ping()
        assert store.add(FERN) is True
    with open_store(url) as store:
        store.ping()


@pytest.mark.parametrize('command', ['ALL', 'SELECT', 'UPDATE'])
def test_policy_that_hides_plants_is_refused(database, made, role, command):
    """A role that is not shown every plant would refuse repeats, and list a part."""
    with open_store(made) as store:
        store.add(FERN)
    database.execute(
        'ALTER TABLE plants ENABLE ROW LEVEL SECURITY; '
        f"CREATE POLICY hiding ON plants FOR {command} USING (name <> 'Fern')",
        url=made,
    )
    with open_store(role(made, *RIGHTS)) as store:
        for use in store.ping, lambda: store.add(FERN), lambda: list(store):
            with refused('a policy of the table plants hides plants'):
                use()
            time.sleep(RETRY_AFTER)
    with open_store(made) as store:  # as its owner, who is under no policy
        assert store.add(FERN) is False


@pytest.mark.parametrize(
    'change',
    [
        'ALTER TABLE plants ALTER name TYPE char(20)',
        TRIGGER.replace("IF NEW.name = 'bad' THEN {}; END IF; ", '{}; ').format(
            'NEW.name := left(NEW.name, 20)'
        ),
        'CREATE RULE it AS ON INSERT TO plants DO INSTEAD NOTHING',
        "ALTER TABLE plants DROP tag, ADD tag text GENERATED ALWAYS AS ('x') STORED",
    ],
    ids=['char', 'cut', 'rule', 'generated'],
)
def test_table_that_alters_plants_is_refused(database, made, change):
    """A table that would not keep a plant as it was sent is refused at the start."""
    database.execute(change, url=made)
    refusal = pytest.raises(StoreUnavailable, match=r'changes what|not as the store')
    with open_store(made) as store, refusal:
        store.ping()
    assert database.execute('TABLE plants', url=made) == []


SENT = 'a secret'


def test_what_a_client_sent_is_in_no_error(database, made):
    """An error names the constraint that a plant broke, and nothing of the plant."""
    change = "ALTER TABLE plants ADD CONSTRAINT dry CHECK (tag <> 'wet')"
    database.execute(change, url=made)
    with open_store(made) as store, refused(RULE) as caught:
        store.add(Plant(5, SENT, 'wet'))
    assert SENT not in ''.join(traceback.format_exception(caught.value))
    assert 'SQLSTATE 23514' in caught.value.detail
    assert 'table plants, constraint dry' in caught.value.detail


def test_slow_refusal_refuses_no_other_plant(database, made):
    """A plant that is refused only after many slow attempts takes no time of others."""
    act = "PERFORM pg_sleep(0.07); RAISE 'no' USING ERRCODE = '40001'"
    database.execute(TRIGGER.format(act), url=made)
    good = [Plant(id, 'Fern') for id in range(8)]
    with open_store(made) as store:
        with refused('the database is busy with other changes of the same plants'):
            store.add_many([Plant(-1, 'bad'), *good])
        assert store.add_many(good) == [False] * 8


def test_warning_refuses_no_plant(database, made):
    """A warning that a trigger raises does not refuse what is stored."""
    database.execute(TRIGGER.format("RAISE WARNING 'soon'"), url=made)
    with open_store(made) as store:
        assert store.add(Plant(1, 'bad')) is True


@pytest.mark.parametrize(
    'change',
    [
        'ALTER name TYPE varchar(500)',
        'ALTER id TYPE numeric',
        'ADD note text, DROP tag, ADD tag varchar',
    ],
)
def test_table_may_be_altered(database, made, change):
    """Repeats, conflicts and new plants work after the open table was altered."""
    with open_store(made) as store:

        def use(first):
            for id in range(first, first + 9):  # often enough to prepare statements
                assert store.add(Plant(id, 'Fern')) is True
                assert store.add(Plant(id, 'Fern')) is False
                with pytest.raises(IdTaken):
                    store.add(Plant(id, 'Moss'))

        use(1)
        database.execute(f'ALTER TABLE plants {change}', url=made)
        use(101)
        assert sorted(store)[0] == FERN


def test_bulk_is_limited_by_size(database, made, monkeypatch):
    """add_many sends long plants in few statements of a limited size."""
    database.execute(
        'CREATE TABLE sizes (n int); CREATE FUNCTION count_all() RETURNS trigger AS '
        '$$BEGIN INSERT INTO sizes SELECT sum(length(name)) FROM added; RETURN NULL; '
        'END$$ LANGUAGE plpgsql; CREATE TRIGGER count_all AFTER INSERT ON plants '
        'REFERENCING NEW TABLE AS added EXECUTE FUNCTION count_all()',
        url=made,
    )
    plants = [Plant(id, 'x' * 60_000) for id in range(100)]
    with open_store(made) as store:
        assert store.add_many(plants) == [True] * 100
        assert store.add_many(plants) == [False] * 100
    ((most, *others),) = database.execute(
        'SELECT max(n), count(n), sum(n) FROM sizes', url=made
    )
    assert others == [6, 6_000_000]
    assert most <= BATCH_CHARACTERS + 60_000


def test_few_statements_are_prepared(made):
    """A session prepares few statements, whatever the sizes of batches and ids."""
    with open_store(made) as store:
        for size in range(1, 15):
            for first in (0, 10**5, 10**10):
                for _ in range(6):
                    store.add_many([Plant(first + n, 'Fern') for n in range(size)])
        with store._backend().pool.lend(math.inf) as connection:
            prepared = connection.execute('SELECT 1 FROM pg_prepared_statements')
            assert len(prepared.fetchall()) <= 3


@pytest.mark.parametrize('encoding', ['LATIN1', 'SQL_ASCII'])
def test_database_must_be_utf8(database, encoding):
    """A database whose encoding cannot hold every text is refused."""
    name = encoding.lower()
    with suppress(psycopg.errors.DuplicateDatabase):
        database.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING {encoding} LOCALE 'C'"
        )
    url = database.url().replace('/postgres', f'/{name}')
    with open_store(url) as store:
        for use in (store.ping, lambda: list(store)):
            with refused(f'the database is encoded in {encoding}'):
                use()
            time.sleep(RETRY_AFTER)
    assert not has_table(database, url)


# ---- settings of the role


SETTINGS = {  # of a role: given, used
    'array_nulls': ('off', 'on'),
    'client_min_messages': ('error', 'warning'),
    'default_transaction_isolation': ('serializable', 'read committed'),
    'exit_on_error': ('on', 'off'),
    'idle_in_transaction_session_timeout': ('100ms', '0'),
    'idle_session_timeout': ('100ms', '0'),
    'lock_timeout': ('0', f'{1000 * LOCK_WITHIN:.0f}ms'),
    'statement_timeout': ('100ms', f'{STATEMENT_WITHIN}s'),
    'synchronous_commit': ('local', 'on'),
    'transaction_timeout': ('100ms', '0'),
}


def test_settings_of_the_role_are_corrected(database, made, role):
    """What an acknowledgement or a list needs holds, whatever the role's settings."""
    given = {setting: value for setting, (value, _) in SETTINGS.items()}
    plants = [Plant(id, 'Fern' * 100) for id in range(20_000)]
    with open_store(role(made, *RIGHTS, **given)) as store:
        store.add_many(plants)
        assert store.add(MOSS._replace(id=-1, tag=None)) is True
        reader = iter(store)
        first = next(reader)
        wait_until(
            lambda: database.execute(
                "SELECT 1 FROM pg_stat_activity WHERE application_name = 'plants' "
                "AND clock_timestamp() - xact_start > interval '0.2 s'"
            )
        )
        assert sorted([first, *reader]) == [Plant(-1, 'Moss'), *plants]
        with store._backend().pool.lend(math.inf) as connection:
            assert {
                setting: connection.execute(f'SHOW {setting}').fetchall()[0][0]
                for setting in SETTINGS
            } == {setting: value for setting, (_, value) in SETTINGS.items()}
    safer = role(made, *RIGHTS, synchronous_commit='remote_apply')
    with open_store(safer) as store, store._backend().pool.lend(math.inf) as connection:
        kept = connection.execute('SHOW synchronous_commit').fetchall()
        assert kept == [('remote_apply',)]


def test_read_only_role_is_refused(made, role):
    """A role whose transactions are read-only by default is refused for that reason."""
    url = role(made, *RIGHTS, default_transaction_read_only='on')
    for more in ('', '&target_session_attrs=any'):
        with open_store(url + more) as store:
            for use in (store.ping, lambda: store.add(FERN)):
                with refused('the primary is read-only'):
                    use()
            assert list(store) == []


def test_one_connection_is_enough(database, made, role):
    """If the role may have only one connection, all adds go through it."""
    url = role(made, *RIGHTS)
    name = url.partition('://')[2].partition('@')[0]
    database.execute(f'ALTER ROLE {name} CONNECTION LIMIT 1')
    with open_store(url) as store:

        def add_all(start):
            for id in range(start, start + 20):
                assert store.add(Plant(id, 'Fern')) is True
                store.ping()

        in_threads(*(lambda at=at: add_all(100 * at) for at in range(1, 9)))
        with open_store(url) as other:
            for use in (lambda: other.add(MOSS), lambda: list(other)):
                with refused('the database allows no more connections') as caught:
                    use()
                assert 'too many connections' in caught.value.detail


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        ('ALTER ROLE {role} NOLOGIN', 'the database refuses the login'),
        (
            'REVOKE CONNECT ON DATABASE lonely FROM PUBLIC',
            'the database refuses the login',
        ),
        (
            'ALTER DATABASE lonely ALLOW_CONNECTIONS false',
            'the database accepts no connections',
        ),
        (
            'ALTER DATABASE lonely CONNECTION LIMIT 0',
            'the database allows no more connections',
        ),
    ],
    ids=['nologin', 'connect', 'closed', 'limit'],
)
def test_refused_login_is_told(database, lonely, role, change, reason):
    """A refused login has its reason each time, and the server's words once."""
    url = role(lonely)
    name = url.partition('://')[2].partition('@')[0]
    database.execute(change.format(role=name))
    with open_store(url) as store:
        for number in range(3):
            with refused(reason) as caught:
                store.ping()
            assert bool(caught.value.detail) is (number == 0)
            time.sleep(RETRY_AFTER)


def test_full_server_is_told(made, role):
    """If only reserved connections are left, the reason is that there is no room."""
    url = role(made, *RIGHTS)
    with ExitStack() as opened, open_store(url) as store:
        with suppress(psycopg.OperationalError):
            for _ in range(100):
                opened.enter_context(psycopg.connect(url))
        with refused('the database allows no more connections') as caught:
            store.ping()
    assert 'remaining connection slots' in caught.value.detail
    assert 'this process holds 0; max_connections' in caught.value.detail


# ---- the URL


def test_password_may_have_any_character(database, lonely):
    """A password may have any character, escaped, in the URL or its parameters."""
    escaped = quote(PASSWORD, safe='')
    at = f'127.0.0.1:{database.port}/lonely'
    for url in (
        f'postgresql://sealed:{escaped}@{at}',
        f'postgres://sealed@{at}?password={escaped}',
        f'postgresql://{at}?user=sealed&password={escaped}',
    ):
        with open_store(url) as store:
            store.ping()
            assert PASSWORD not in masked(url) + repr(store)
            assert escaped not in masked(url) + repr(store)


AWAY = 'there is no connection to the database'
LOGIN = 'the database refuses the login'


@pytest.mark.parametrize(
    ('change', 'reason', 'detail'),
    [
        (lambda url: url.replace('sealed:', 'sealed:not-'), LOGIN, 'authentication'),
        (
            lambda url: url.replace('/postgres?', '/nowhere?'),
            'there is no such database',
            'database "nowhere" does not exist',
        ),
        (lambda url: url.replace('127.0.0.1', 'host.invalid'), AWAY, 'not resolve'),
        (
            lambda url: f'{url}&host=::1,127.0.0.1&port={free_port()}',
            'no host takes plants',
            'refused',
        ),
        (
            lambda url: (
                re.sub('@[^/]*', '@', url)
                + f'&hostaddr=127.0.0.1,127.0.0.1&port={free_port()}'
            ),
            'no host takes plants',
            '127.0.0.1:',
        ),
        (lambda url: f'{url}&connect_timeout=soon', AWAY, 'connect_timeout'),
        (lambda url: f'{url}&sslmode=require', LOGIN, 'SSL'),
    ],
    ids=['password', 'database', 'name', 'hosts', 'addresses', 'number', 'ssl'],
)
def test_connection_error_shows_no_password(database, change, reason, detail, caplog):
    """A connection error comes in time, with its reason, and never the password."""
    escaped = quote(PASSWORD, safe='')
    at = f'127.0.0.1:{database.port}/postgres?application_name=it'
    caplog.set_level(logging.DEBUG)
    url = change(f'postgresql://sealed:{escaped}@{at}')
    with open_store(url) as store:
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


@pytest.mark.parametrize('first', ['hangs.invalid', 'missing.invalid'])
def test_name_that_does_not_resolve_delays_no_add(database, lonely, monkeypatch, first):
    """A name that hangs costs two seconds, also beside one that resolves."""
    ended, resolve = threading.Event(), socket.getaddrinfo

    def look_up(name, *arguments, **options):
        if name == 'hangs.invalid':
            ended.wait(PATIENCE)
        return resolve(name, *arguments, **options)

    monkeypatch.setattr(socket, 'getaddrinfo', look_up)
    port = database.port
    try:
        with open_store(lonely.replace('127.0.0.1', first)) as store:
            with refused(AWAY, within=5) as caught:
                store.add(FERN)
            assert 'resolve' in caught.value.detail
        url = lonely.replace(f'127.0.0.1:{port}', f'{first}:{port},localhost:{port}')
        with open_store(url) as store:
            store.add(FERN)
            database.stop()
            try:
                with refused('no host takes plants', within=5) as caught:
                    store.add(MOSS)
            finally:
                database.start()
            words = rf'{first}:{port}: .* resolve.*; localhost:{port}: .*refused'
            assert re.match(words, caught.value.detail)
    finally:
        ended.set()


def test_unix_socket(database, lonely):
    """A server on the same machine may be reached by a Unix socket."""
    directory = quote(str(database.directory), safe='')
    for url in (
        f'postgresql://gardener@{directory}:{database.port}/lonely',
        f'postgresql:///lonely?user=gardener&host={directory}&port={database.port}',
    ):
        with open_store(url) as store:
            store.ping()
