"""The PostgreSQL store and its database: table, rights, settings, URL."""

import logging
import time
import traceback
from contextlib import ExitStack, suppress
from itertools import count
from urllib.parse import quote

import psycopg
import pytest
from postgresql import accepts_connections, refused
from server import free_port

from store import IdTaken, Plant, StoreUnavailable, masked, open_store
from store.base import BATCH_CHARACTERS
from store.postgresql.connection import LOCK_WITHIN, STATEMENT_WITHIN
from store.postgresql.pool import RETRY_AFTER
from store.testing.waiting import in_threads, wait_until

FERN = Plant(1, 'Fern')
MOSS = Plant(2, 'Moss', 'shade')
# Every character that could end a password early, in a URL or in libpq.
PASSWORD = "s3cr@:/?#%& +='\\é"

numbers = count()


@pytest.fixture(scope='session')
def server(server):
    """A server where a role needs a password, and others may not write to its log."""
    access = server.data / 'pg_hba.conf'
    sealed = 'host all sealed 127.0.0.1/32 scram-sha-256\n'
    access.write_text(sealed + access.read_text())
    literal = PASSWORD.replace("'", "''")
    server.execute(f"CREATE ROLE sealed LOGIN SUPERUSER PASSWORD '{literal}'")
    server.execute(
        'REVOKE EXECUTE ON FUNCTION pg_logical_emit_message'
        '(boolean, text, text, boolean) FROM PUBLIC'
    )
    server.configure('')
    sealed_url = server.url().replace('gardener', 'sealed')
    wait_until(lambda: not accepts_connections(sealed_url))
    return server


@pytest.fixture
def made(server, url):
    """The URL of a store without plants whose table exists."""
    with open_store(url) as store:
        store.ping()
    return url


@pytest.fixture
def role(server):
    """Return a function that makes a role, and returns its URL."""

    def make(url, *grants, **settings):
        name = f'role_{next(numbers)}'
        server.execute(f'CREATE ROLE {name} LOGIN')
        schema = url.rpartition('%3D')[2]
        server.execute(f'GRANT USAGE ON SCHEMA {schema} TO {name}')
        for grant in grants:
            server.execute(f'GRANT {grant} TO {name}', url=url)
        for setting, value in settings.items():
            server.execute(f"ALTER ROLE {name} SET {setting} = '{value}'")
        return url.replace('gardener', name)

    return make


def has_table(server, url):
    """Return whether the table exists."""
    return server.execute("SELECT to_regclass('plants')", url=url) != [(None,)]


# ---- the table


def test_first_uses_at_once_make_one_table(server):
    """Eight stores that first use a database at once make one table, no error."""
    for _ in range(5):
        url = server.new_url()
        with ExitStack() as opened:
            stores = [opened.enter_context(open_store(url)) for _ in range(8)]
            in_threads(*(lambda store=store: store.add(FERN) for store in stores))
        assert server.execute('TABLE plants', url=url) == [FERN]


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


def test_missing_right_to_make_the_table(server, url, role):
    """Without the table and the right to make it, the store is not ready."""
    with open_store(role(url)) as store, refused('the database does not permit it'):
        store.ping()


def test_create_never_makes_no_table(server, url):
    """With ``create='never'`` a missing table is an error; readers never make one."""
    with open_store(url) as store:
        assert list(store) == []
        store.check_opening()
    with open_store(url, create='never') as store:
        for use in (store.ping, lambda: store.add(FERN), lambda: list(store)):
            with refused('there is no table plants'):
                use()
        assert not has_table(server, url)
        with open_store(url) as maker:
            maker.ping()
        time.sleep(RETRY_AFTER)
        assert store.add(FERN) is True


def test_dropped_table_is_not_made_again(server, made):
    """A table that was dropped under an open store is not made again."""
    with open_store(made) as store:
        store.add(FERN)
        server.execute('DROP TABLE plants', url=made)
        server.terminate_sessions()  # a new one must not make it either
        for use in (lambda: store.add(MOSS), store.ping):
            with refused('there is no table plants'):
                use()
        assert not has_table(server, made)


@pytest.mark.parametrize(
    'columns',
    [
        'id bigint, name text, tag text',
        'id bigint PRIMARY KEY, name text',
        'id bigint PRIMARY KEY, title text, tag text',
        'id bigint, part int, name text, tag text, PRIMARY KEY (id, part)',
    ],
)
def test_unsuitable_table_is_refused(server, url, columns):
    """A table without a unique id, or without a column, is refused at once."""
    server.execute(f'CREATE TABLE plants ({columns})', url=url)
    with open_store(url) as store:
        for use in (store.ping, lambda: store.add(FERN)):
            with refused('the database does not permit it'):
                use()
    assert server.execute('TABLE plants', url=url) == []


def test_table_may_have_more_columns(server, url):
    """A table may have more columns, in any order."""
    server.execute(
        'CREATE TABLE plants (at timestamptz DEFAULT now(), tag varchar, note text, '
        'name text COLLATE "C", id int8 UNIQUE)',
        url=url,
    )
    with open_store(url) as store:
        assert store.add_many([FERN, MOSS]) == [True, True]
        assert store.add_many([FERN, MOSS]) == [False, False]
        assert sorted(store) == [FERN, MOSS]


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
def test_plant_that_breaks_a_rule_is_refused_alone(server, made, role, rule):
    """Of a batch only the plant that breaks a rule is refused, not even its rival."""
    statements, name, reason = RULES[rule]
    server.execute(statements, url=made)
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


def test_warning_refuses_no_plant(server, made):
    """A warning that a trigger raises does not refuse what is stored."""
    server.execute(TRIGGER.format("RAISE WARNING 'soon'"), url=made)
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
def test_table_may_be_altered(server, made, change):
    """Repeats, conflicts and new plants work after the open table was altered."""
    with open_store(made) as store:

        def use(first):
            for id in range(first, first + 9):  # often enough to prepare statements
                assert store.add(Plant(id, 'Fern')) is True
                assert store.add(Plant(id, 'Fern')) is False
                with pytest.raises(IdTaken):
                    store.add(Plant(id, 'Moss'))

        use(1)
        server.execute(f'ALTER TABLE plants {change}', url=made)
        use(101)
        assert sorted(store)[0] == FERN


def test_bulk_is_limited_by_size(server, made, monkeypatch):
    """add_many sends long plants in few statements of a limited size."""
    server.execute(
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
    ((most, *others),) = server.execute(
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
        with store._backend().pool.lend() as connection:
            prepared = connection.execute('SELECT 1 FROM pg_prepared_statements')
            assert len(prepared.fetchall()) <= 3


@pytest.mark.parametrize('encoding', ['LATIN1', 'SQL_ASCII'])
def test_database_must_be_utf8(server, encoding):
    """A database whose encoding cannot hold every text is refused."""
    name = encoding.lower()
    with suppress(psycopg.errors.DuplicateDatabase):
        server.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING {encoding} LOCALE 'C'"
        )
    url = server.url().replace('/postgres', f'/{name}')
    with open_store(url) as store:
        for use in (store.ping, lambda: list(store)):
            with refused(f'the database is encoded in {encoding}'):
                use()
            time.sleep(RETRY_AFTER)
    assert not has_table(server, url)


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


def test_settings_of_the_role_are_corrected(server, made, role):
    """What an acknowledgement or a list needs holds, whatever the role's settings."""
    given = {setting: value for setting, (value, _) in SETTINGS.items()}
    plants = [Plant(id, 'Fern' * 100) for id in range(20_000)]
    with open_store(role(made, *RIGHTS, **given)) as store:
        store.add_many(plants)
        assert store.add(MOSS._replace(id=-1, tag=None)) is True
        reader = iter(store)
        first = next(reader)
        wait_until(
            lambda: server.execute(
                "SELECT 1 FROM pg_stat_activity WHERE application_name = 'plants' "
                "AND clock_timestamp() - xact_start > interval '0.2 s'"
            )
        )
        assert sorted([first, *reader]) == [Plant(-1, 'Moss'), *plants]
        with store._backend().pool.lend() as connection:
            assert {
                setting: connection.execute(f'SHOW {setting}').fetchall()[0][0]
                for setting in SETTINGS
            } == {setting: value for setting, (_, value) in SETTINGS.items()}
    safer = role(made, *RIGHTS, synchronous_commit='remote_apply')
    with open_store(safer) as store, store._backend().pool.lend() as connection:
        kept = connection.execute('SHOW synchronous_commit').fetchall()
        assert kept == [('remote_apply',)]


def test_read_only_role_is_refused(made, role):
    """A role whose transactions are read-only by default is refused for that reason."""
    url = role(made, *RIGHTS, default_transaction_read_only='on')
    for more in ('', '&target_session_attrs=any'):
        with open_store(url + more) as store:
            for use in (store.ping, lambda: store.add(FERN)):
                with refused('the database is read-only'):
                    use()
            assert list(store) == []


def test_one_connection_is_enough(server, made, role):
    """If the role may have only one connection, all adds go through it."""
    url = role(made, *RIGHTS)
    name = url.partition('://')[2].partition('@')[0]
    server.execute(f'ALTER ROLE {name} CONNECTION LIMIT 1')
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


# ---- the URL


def test_password_may_have_any_character(server):
    """A password may have any character, escaped, in the URL or its parameters."""
    escaped = quote(PASSWORD, safe='')
    at = f'127.0.0.1:{server.port}/postgres'
    for url in (
        f'postgresql://sealed:{escaped}@{at}',
        f'postgres://sealed@{at}?password={escaped}',
        f'postgresql://{at}?user=sealed&password={escaped}',
    ):
        with open_store(url) as store:
            store.ping()
            assert PASSWORD not in masked(url) + repr(store)
            assert escaped not in masked(url) + repr(store)


@pytest.mark.parametrize(
    ('change', 'detail'),
    [
        (lambda url, port: url.replace('sealed:', 'sealed:not-'), 'authentication'),
        (lambda url, port: url.replace('/postgres?', '/nowhere?'), 'does not exist'),
        (lambda url, port: url.replace('127.0.0.1', 'host.invalid'), 'host.invalid'),
        (lambda url, port: f'{url}&host=::1,127.0.0.1&port={port}', 'refused'),
        (lambda url, port: f'{url}&connect_timeout=soon', 'connect_timeout'),
        (lambda url, port: f'{url}&sslmode=require', 'SSL'),
    ],
    ids=['password', 'database', 'name', 'hosts', 'number', 'ssl'],
)
def test_connection_error_shows_no_password(server, change, detail, caplog):
    """A connection error comes in time, with its reason, and never the password."""
    escaped = quote(PASSWORD, safe='')
    at = f'127.0.0.1:{server.port}/postgres?application_name=it'
    caplog.set_level(logging.DEBUG)
    url = change(f'postgresql://sealed:{escaped}@{at}', free_port())
    with open_store(url) as store:
        with refused('there is no connection to the database') as caught:
            store.add(FERN)
        assert detail in caught.value.detail
        shown = [''.join(traceback.format_exception(caught.value)), caplog.text]
        error = caught.value
        while error is not None:
            shown += [str(error), repr(error), repr(error.args), repr(vars(error))]
            error = error.__cause__ or error.__context__
    for form in (PASSWORD, escaped):
        assert form not in ''.join(shown)


def test_unix_socket(server):
    """A server on the same machine may be reached by a Unix socket."""
    directory = quote(str(server.directory), safe='')
    for url in (
        f'postgresql://gardener@{directory}:{server.port}/postgres',
        f'postgresql:///postgres?user=gardener&host={directory}&port={server.port}',
    ):
        with open_store(url) as store:
            store.ping()
