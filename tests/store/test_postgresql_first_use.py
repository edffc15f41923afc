"""The PostgreSQL store and its database: table, rights, settings, URL."""

import logging
import os
import re
import socket
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from contract import at_once
from exchange import table
from postgresql import accepts_connections, assert_refused, trigger, witness, works
from waiting import FORK, wait_until

from store import IdTaken, Plant, open_store, postgresql
from store.postgresql import connection

FERN, REED, MOSS = Plant(1, 'Fern'), Plant(1, 'Reed'), Plant(2, 'Moss', 'shade')
RIGHTS = ['SELECT ON plants', 'INSERT ON plants', 'UPDATE (id) ON plants']
SECURED = 'ALTER TABLE plants ENABLE ROW LEVEL SECURITY; '
HIDING = f"{SECURED}CREATE POLICY hiding ON plants USING (name <> 'Fern')"
SENT = 'a secret'  # a traceback shows the lines of this module
LOGIN = 'the database refuses the connection'
ALTERED = 'the table plants changes what is added'
FILES = 'a certificate or key for the database cannot be read'
RULE = 'a rule of the table plants does not permit it'
BUSY = 'the database is busy with other changes of the same plants'
LACKS = 'the table plants is not as the store needs it'
DENIED = 'the database does not permit it'
# Every character that could end a password early, in a URL or in libpq.
PASSWORD = "s3cr@:/?#%& +='\\é"
numbers = count()  # of roles


@pytest.fixture(scope='session')
def sealed(database):
    """The URL of a server, for a role that needs a password, without it."""
    access = database.data / 'pg_hba.conf'
    line = 'host all sealed 127.0.0.1/32 scram-sha-256\n'
    access.write_text(line + access.read_text())
    literal = PASSWORD.replace("'", "''")
    database.execute(f"CREATE ROLE sealed LOGIN SUPERUSER PASSWORD '{literal}'")
    database.configure('')
    url = database.url().replace('gardener', 'sealed')
    wait_until(lambda: not accepts_connections(url))
    return url


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


def has_table(database, url):
    """Return whether the table exists."""
    return database.execute("SELECT to_regclass('plants')", url=url) != [(None,)]


def test_role_needs_few_rights(database, made, role):
    """A role needs the rights to select, insert and lock; it is refused without one."""
    with open_store(role(made, *RIGHTS)) as store:
        store.ping()
        assert store.add_many([FERN, FERN, FERN._replace(tag='')])[:2] == [True, False]
        with pytest.raises(IdTaken):
            store.add(REED)
        assert list(store) == [FERN]
        # A policy hides a plant: nobody reads a part of them.
        database.execute(HIDING, url=made)
        assert_refused(None, partial(store.add, FERN), partial(list, store))
    for missing in RIGHTS:
        with open_store(role(made, *{*RIGHTS} - {missing})) as store:
            assert_refused(DENIED, store.ping, partial(store.add, FERN))


def test_table_is_made_by_no_reader(database, url, role, caplog):
    """A reader makes no table, and nobody makes one again, or without the right."""
    with open_store(role(url)) as store:
        assert_refused(DENIED, store.ping)
    with open_store(url) as store:
        assert list(store) == []
        assert not has_table(database, url)
        store.load()
        database.execute('DROP TABLE plants', url=url)
        database.terminate_sessions()
        assert_refused(None, *uses(store), store.load)
    assert [caplog.text.count('plants was made'), has_table(database, url)] == [1, 0]


TEXTS = [f'{member} text' for member in Plant._fields[2:]]  # tag, and others
MADE = f'CREATE {{}} TABLE plants (id {{}} PRIMARY KEY, name {{}}, {", ".join(TEXTS)})'
DOMAINS = 'CREATE DOMAIN short AS char(20); CREATE DOMAIN shorter AS short; '
PARTS = (
    'CREATE TABLE plants (id bigint PRIMARY KEY, name text, tag text) '
    'PARTITION BY RANGE (id); CREATE TABLE part PARTITION OF plants DEFAULT '
    'PARTITION BY RANGE (id); CREATE UNLOGGED TABLE deep PARTITION OF part DEFAULT'
)
FOREIGN = (
    'CREATE FOREIGN DATA WRAPPER none; CREATE SERVER none FOREIGN DATA WRAPPER none; '
    'CREATE FOREIGN TABLE plants (id bigint, name text, tag text) SERVER none'
)
KEPT = MADE.format('', 'bigint', 'text')
UNIQUE = KEPT.replace('PRIMARY KEY', 'UNIQUE')
OTHERS = {  # what is wrong with a table that another program has made
    'lacks tag': 'CREATE TABLE plants (id bigint PRIMARY KEY, name text)',
    'plants is UNLOGGED': MADE.format('UNLOGGED', 'bigint', 'text'),
    'deep is UNLOGGED': PARTS,
    'more inherits': f'{KEPT}; CREATE TABLE more () INHERITS (plants)',
    'id is text, not bigint': MADE.format('', 'text', 'text'),
    'id is double precision': MADE.format('', 'float8', 'text'),
    'id is not UNIQUE and NOT NULL': UNIQUE,
    'name is short, not text': DOMAINS + MADE.format('', 'bigint', 'shorter'),
    'name is character,': DOMAINS + MADE.format('', 'bigint', 'short'),
    'id is not UNIQUE': KEPT.replace(' PRIMARY KEY', ''),
    'id is not UNIQUE and': f'{UNIQUE}; ALTER TABLE plants ADD NOT NULL id NOT VALID',
    'plants is no table': 'CREATE VIEW plants AS SELECT 1 AS id',
    'plants is no table,': FOREIGN,
}


@pytest.mark.parametrize('wrong', OTHERS)
def test_table_that_may_lose_or_change_plants_is_refused(database, url, wrong):
    """The refusal says what is wrong, before anything is stored or listed."""
    database.execute(OTHERS[wrong], url=url)
    with open_store(url) as store:
        for error in assert_refused(LACKS, *uses(store), partial(list, store)):
            assert wrong.rstrip(',') in str(error)
        if wrong == 'lacks tag':
            database.execute(f'ALTER TABLE plants ADD {", ADD ".join(TEXTS)}', url=url)
            assert store.add(MOSS) is True


@pytest.mark.parametrize('id_type', ['smallint', 'positive'])
def test_table_of_another_program_keeps_plants_exactly(database, url, id_type):
    """Other types are fine if no text changes, and if ids are sorted as numbers."""
    database.execute('CREATE DOMAIN positive AS bigint CHECK (VALUE > 0)', url)
    database.execute('CREATE DOMAIN word AS varchar(200)', url)
    database.execute(MADE.format('', id_type, 'word'), url)
    plants = [Plant(id, f'Fern{" " * id}', 'Wet') for id in (5, 9, 10, 100)]
    with open_store(url) as store:
        store.ping()
        assert store.add_many(plants * 2) == [True] * 4 + [False] * 4
        with pytest.raises(IdTaken):
            store.add(plants[0]._replace(tag='wet'))
        assert list(store) == plants
        # PostgreSQL cuts blanks that are too many.
        blanks = plants[0]._replace(id=99, name=f'Fern{" " * 200}')
        assert_refused(ALTERED, partial(store.add, blanks))
        database.execute('INSERT INTO plants VALUES (101)', url=url)  # no plant
        assert_refused(LACKS, partial(list, store))


def test_second_table_is_not_made(database):
    """If the search_path no longer leads to the table, no other one is made."""
    database.execute('CREATE DATABASE lonely')  # without tables of other tests
    lonely = database.url().replace('/postgres', '/lonely')
    why = 'the search_path does not lead to one table plants'
    change = 'ALTER DATABASE lonely SET search_path = '
    database.execute('CREATE SCHEMA other', url=lonely)
    database.execute('CREATE SCHEMA its CREATE SEQUENCE plants', url=lonely)  # no table
    with open_store(lonely) as first:
        first.add(FERN)
        database.execute(f'{change} other')
        database.terminate_sessions()
        wait_until(lambda: not database.sessions())
        with pytest.raises(IdTaken):  # it names its table with the schema
            first.add(REED)
    with open_store(lonely) as store:
        for ex in assert_refused(why, *uses(store), partial(list, store), store.load):
            assert 'public.plants' in str(ex)
    assert not has_table(database, lonely)
    # Who names the schema in the URL wants a table there.
    with open_store(f'{lonely}?options=-csearch_path%3Dother') as store:
        assert store.add(REED) is True
    database.execute(f'{change} other, public')
    with open_store(lonely) as store:
        for error in assert_refused(why, store.ping, partial(list, store)):
            assert 'other.plants' in str(error)


BAD = "IF NEW.name = 'bad' THEN {}; END IF"
POLICY = (
    f'{SECURED}'
    'CREATE POLICY reading ON plants FOR SELECT USING (true); '
    'CREATE POLICY locking ON plants FOR UPDATE USING (true); '
    "CREATE POLICY adding ON plants FOR INSERT WITH CHECK (name <> 'bad')"
)

# How a table refuses a plant with the name "bad": the reason, the statements.
RULES = {
    'check': (RULE, "ALTER TABLE plants ADD CHECK (name <> 'bad')"),
    'trigger': (RULE, trigger(BAD.format(r"RAISE E'a\nb\x1b[2J S3cret'"))),
    'busy': (BUSY, trigger(BAD.format("RAISE 'no' USING ERRCODE = '40001'"))),
    'policy': (DENIED, POLICY),
}


@table('reason, statements', RULES)
def test_plant_that_breaks_a_rule_is_refused_alone(
    database, made, role, monkeypatch, reason, statements
):
    """Of a batch only that plant is refused, and nothing of it named; a ping works."""
    monkeypatch.setattr(postgresql, 'PROBE_EVERY', 0)
    database.execute(statements, url=made)
    bad = Plant(600, 'bad', SENT)
    good = [Plant(id, f'Fern{id}') for id in range(1, 9)]
    with open_store(f'{role(made, *RIGHTS)}&password=S3cret') as store:
        store.ping()  # a rule of an empty table is no reason to take no plant
        both = [*good[:3], bad, *good[3:]]
        [error] = assert_refused(reason, partial(store.add_many, both))
        # It has the words of the server, without secrets and control characters.
        assert re.search(r'SQLSTATE \w{5}', str(error))
        assert not re.search('S3cret|[\n\x1b]', str(error))
        assert SENT not in ''.join(traceback.format_exception(error))
        assert store.add_many(good) == [False] * 8
        store.ping()


ALTER = 'ALTER TABLE plants {}'.format
DROP = 'DROP TRIGGER act ON plants'
ARCHIVE = trigger('DELETE FROM plants WHERE id = NEW.id').replace('BEFORE', 'AFTER')
ARCHIVE = ARCHIVE.replace('plpgsql;', 'plpgsql SECURITY DEFINER;')
# What is changed under a running server, and what undoes that; the reason of refusals.
UNFIT = {
    'function': (ALTER('ALTER id TYPE int;') + trigger('PERFORM no()'), DROP, LACKS),
    'cut': (trigger('NEW.name := left(NEW.name, 3)'), DROP, ALTERED),
    'moved': (ARCHIVE, DROP, ALTERED),
    'ignored': (trigger('RETURN NULL'), DROP, ALTERED),
    'rule': ('CREATE RULE no AS ON INSERT TO plants DO INSTEAD NOTHING', None, LACKS),
    'unlogged': (ALTER('SET UNLOGGED'), ALTER('SET LOGGED'), LACKS),
    'owner': (ALTER('ADD it int, ADD NOT NULL it NOT VALID'), ALTER('DROP it'), LACKS),
    'padded': (ALTER('ALTER name TYPE char(20)'), ALTER('ALTER name TYPE text'), None),
}


@table('change, undo, reason', UNFIT)
def test_altered_table_acknowledges_no_changed_plant(
    database, made, role, monkeypatch, change, undo, reason
):
    """What is not stored durably, and as it was sent, is no success; a ping says so."""
    monkeypatch.setattr(postgresql, 'PROBE_EVERY', 0)
    monkeypatch.setattr(postgresql.table, 'ASK_EVERY', 0)
    with open_store(role(made, *RIGHTS)) as store:
        store.add(FERN)
        store.ping()
        database.execute(change, url=made)
        wait_until(lambda: not works(store.ping))
        add = partial(store.add, Plant(3, 'Fern '))
        # Who moves plants away has them.
        assert_refused(reason, store.ping, *[] if change == ARCHIVE else [add])
        if undo:
            database.execute(undo, url=made)
            wait_until(lambda: works(store.ping))
            assert store.add(MOSS) is True


def test_table_may_be_altered(database, made):
    """A table may get more columns and other types while it is open."""
    changes = 'name TYPE varchar(500)', 'id TYPE integer', 'tag TYPE text, ADD it text'
    with open_store(made) as store:
        for at, change in enumerate(changes):
            for id in range(9 * at, 9 * at + 9):  # enough to prepare statements
                assert store.add(Plant(id, 'Fern', 'wet')) is True
                assert store.add(Plant(id, 'Fern', 'wet')) is False
                with pytest.raises(IdTaken):
                    store.add(Plant(id, 'Moss', 'wet'))
            database.execute(f'ALTER TABLE plants ALTER {change}', url=made)
        assert store.add(Plant(99, 'Fern')) is True
        assert sorted(store)[0] == Plant(0, 'Fern', 'wet')


def test_unsafe_database_is_warned_of(database, url, caplog):
    """The log says which setting may lose what was acknowledged."""
    database.configure('full_page_writes = off\n')
    try:
        wait_until(lambda: database.execute('SHOW full_page_writes') == [('off',)])
        with open_store(f'{url}%20-czero_damaged_pages%3Don') as store:
            store.ping()
    finally:
        database.configure('full_page_writes = on\n')
    assert 'full_page_writes = off, zero_damaged_pages = on' in caplog.text


def test_database_must_be_utf8(database):
    """A database whose encoding does not hold every text as it is is refused."""
    database.execute('CREATE DATABASE bytes TEMPLATE template0 ENCODING SQL_ASCII')
    with open_store(database.url().replace('/postgres', '/bytes')) as store:
        assert_refused(LACKS, store.ping, partial(list, store))


SETTINGS = {  # which are given to a role, and which are used
    'client_encoding': ('latin1', 'UTF8'),
    'client_min_messages': ('error', 'warning'),
    'default_transaction_isolation': ('serializable', 'read committed'),
    'lock_timeout': ('0', f'{1000 * connection.LOCK_WITHIN:.0f}ms'),
    'statement_timeout': ('100ms', f'{connection.STATEMENT_WITHIN}s'),
    'transaction_timeout': ('400ms', '400ms'),  # of PostgreSQL 17
}


@pytest.mark.parametrize('levels', [('local', 'on'), ('remote_apply', 'remote_apply')])
def test_settings_of_the_role_are_corrected(database, made, role, levels):
    """What an acknowledgement or a list needs holds, whatever the role's settings."""
    settings = SETTINGS | {'synchronous_commit': levels}
    database.execute(witness(*settings), url=made)
    given = {name: value for name, (value, _) in settings.items()}
    url = role(made, *RIGHTS, **given) + '&client_encoding=latin1'
    with open_store(url) as store:
        assert store.add(FERN._replace(tag='🌿')) is True
        assert list(store) == [FERN._replace(tag='🌿')]
        database.execute(trigger('PERFORM pg_sleep(1)'), url=made)
        assert_refused('the database did not answer in time', partial(store.add, MOSS))
    seen = database.execute('SELECT DISTINCT seen FROM plants', url=made)
    assert seen == [([used for _, used in settings.values()],)]


def test_forms_of_a_url(database, url, sealed):
    """A password may have any character, escaped; a Unix socket may be the host."""
    with_password = f'sealed:{quote(PASSWORD, safe="")}'
    directory = quote(str(database.directory), safe='')
    for old, new in ('gardener', with_password), ('127.0.0.1', directory):
        with open_store(url.replace(old, new)) as store:
            store.ping()


# What is replaced in a URL, by what; the reason, and what the detail has, of each host.
WRONG_URLS = {
    'password': ('sealed:', 'sealed:not-', LOGIN, 'authentication'),
    'method': ('[?]', '?require_auth=md5&', LOGIN, 'method requirement'),
    'database': ('/postgres[?]', '/nowhere?', LOGIN, '"nowhere" does not exist'),
    'kinds': ('@(.*)/postgres', r'@[::1]:1,\1/nowhere', LOGIN, '::1.*nowhere'),
}


@table('old, new, reason, detail', WRONG_URLS)
def test_connection_error_shows_no_password(sealed, old, new, reason, detail, caplog):
    """A connection error comes in time, with its reason, and never the password."""
    escaped = quote(PASSWORD, safe='')
    caplog.set_level(logging.DEBUG)
    url = sealed.replace('sealed', f'sealed:{escaped}') + '?application_name=it'
    with open_store(re.sub(old, new, url)) as store:
        [error] = assert_refused(reason, partial(store.add, FERN))
        assert re.search(detail, str(error))
    shown = ''.join(traceback.format_exception(error)) + repr(error) + caplog.text
    assert not any(secret in shown for secret in (PASSWORD, escaped))


def test_refusal_in_another_language():
    """What it, or libpq, says is told apart from no server; the log has the words."""
    error = b'SFATAL\0C28P01\0MPasswort-Authentifizierung fehlgeschlagen\0\0'
    with socket.create_server(('127.0.0.1', 0)) as listener, ThreadPoolExecutor() as it:

        def answer():
            for said in b'E' + (len(error) + 4).to_bytes(4) + error, b'S':  # has TLS
                with listener.accept()[0] as client:
                    client.recv(99)
                    client.sendall(said)

        it.submit(answer)
        url = f'postgresql://127.0.0.1:{listener.getsockname()[1]}/?sslmode='
        for mode, words in ('disable', 'Passwort'), ('verify-ca', 'certificate file'):
            with open_store(f'{url}{mode}&sslrootcert={__file__}') as store:
                [error] = assert_refused(LOGIN, store.ping)
                assert words in str(error)


def test_certificate_that_is_not_used_is_said(url, tmp_path, monkeypatch, caplog):
    """One that cannot be read is refused, also if libpq would do without TLS."""
    (tmp_path / '.postgresql').mkdir(0)
    monkeypatch.setenv('HOME', str(tmp_path))

    def use_as_nobody():
        if not os.getuid():
            os.setuid(65534)  # nobody
        for parameter in 'sslmode=prefer', 'sslcert=no.crt', 'sslrootcert=no.crt':
            with open_store(f'{url}&{parameter}') as store:
                for error in assert_refused(FILES, *uses(store)):
                    assert '.crt' in str(error)
        open_store(url).ping()
        monkeypatch.setattr(os, 'open', Mock(side_effect=BlockingIOError))  # a lease
        open_store(f'{url}&sslcrl=leased').ping()
        assert caplog.text.count('not encrypted') == 1

    at_once(FORK.Process, use_as_nobody)


UNKNOWN = {'pgbouncer': 'pgbouncer=true', 'options': 'options=endpoint=ep-1'}
UNKNOWN |= {'supa': 'sslmode=prefer&supa=base', 'parameter': 'password=S3cret&Hidden=1'}


@pytest.mark.parametrize('name', UNKNOWN)
def test_parameter_that_libpq_does_not_know_is_named(name):
    """The start is refused with the name of the parameter, and nothing of a value."""
    with pytest.raises(ValueError, match=rf'remove .*\b{name}\b') as caught:
        open_store(f' postgresql://me:S3cret@db.example/plants?{UNKNOWN[name]}\n')
    assert not re.search('(?i)s3cret|hidden|ep-1|base-pooler', str(caught.value))
