"""The PostgreSQL store while a real server or the network fails."""

import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import psycopg
import pytest
from exchange import assert_error, fern, table
from postgresql import PostgreSQL, assert_refused, trigger, works
from proxy import Proxy
from rawclient import request
from server import Server
from waiting import PATIENCE, in_threads, wait_until

from store import IdTaken, Plant, StoreUnavailable, open_store, postgresql

FERN, MOSS = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade')
MANY = [Plant(id, 'Fern' * 100) for id in range(1_200)]
LONGEST = 5 + 2  # seconds of an add, and of a busy machine
AWAY = 'there is no connection to the database'
STANDBY = 'a synchronous standby of the database does not confirm commits'


@pytest.fixture
def store(url):
    """An open store without plants."""
    with open_store(url) as store:
        store.ping()
        yield store


@pytest.fixture
def proxy(url):
    """The proxy between the store ``far`` and its server."""
    with Proxy(urlsplit(url).port) as proxy:
        yield proxy


@pytest.fixture
def far(url, proxy):
    """An open store without plants, behind a proxy."""
    with open_store(proxy.url(url)) as store:
        store.ping()
        yield store


@pytest.fixture
def short_limits(monkeypatch):
    """Limit the waits for a response and for a connection; probe at each ping."""
    monkeypatch.setattr(postgresql, 'PROBE_EVERY', 0)
    monkeypatch.setattr(postgresql.connection, 'ANSWER_WITHIN', 0.3)


@contextmanager
def load(database, url, store):
    """Let eight threads race for ids; at the end check what they were told."""
    seen = SimpleNamespace(outcomes=[], failures=[], took=[])
    ended = threading.Event()

    def add_all(name):
        chance = random.Random(name)
        while not ended.is_set():
            id = 100 + len(seen.outcomes) // 4 + chance.randrange(10)
            plant, began = Plant(id, name), time.monotonic()
            try:
                seen.outcomes.append((plant, store.add(plant)))
            except IdTaken as ex:
                seen.outcomes.append((plant, ex))
            except StoreUnavailable as ex:
                seen.failures.append((name, ex.reason))
            seen.took.append(time.monotonic() - began)
            time.sleep(0.005)  # the database and the test share the cores

    with ThreadPoolExecutor(8) as threads:
        adding = [threads.submit(add_all, name) for name in 'abcdefgh']
        try:
            wait_for_more(seen)
            yield seen
            wait_for_more(seen)
        finally:
            ended.set()
    for thread in adding:
        thread.result()
    assert max(seen.took) < LONGEST
    # One adds, and one may be at its end: cancelled, or lost.
    assert len(database.sessions()) <= 2
    stored = database.execute('TABLE plants', url=url)
    ids = {id for id, *_ in stored}
    assert len(ids) == len(stored)
    for plant, outcome in seen.outcomes:
        assert plant.id in ids
        assert (plant in stored) is not isinstance(outcome, IdTaken)


def wait_for_more(seen):
    """Wait until more adds have been answered than there are threads."""
    goal = len(seen.outcomes) + 8
    wait_until(lambda: len(seen.outcomes) > goal)


@contextmanager
def down(database, url, proxy):
    """Kill the server."""
    database.kill()
    try:
        yield
    finally:
        database.start()


@contextmanager
def frozen(database, url, proxy):
    """Let the server, or the network, hang."""
    proxy.stop()
    yield
    proxy.go_on()


@contextmanager
def table_locked(database, url, proxy):
    """Lock the table, as another session that changes it does."""
    with closing(psycopg.connect(database.own(url))) as other:
        other.execute('LOCK TABLE plants')
        yield


@contextmanager
def waiting_for(name, database, url=None, proxy=None):
    """Let every commit wait for a standby of a name."""
    setting = "synchronous_standby_names = '{}'\n"
    database.configure(setting.format(name))
    try:
        yield
    finally:
        database.configure(setting.format(''))


OUTAGES = {  # and what some adds are told
    'killed': (down, AWAY),
    'frozen': (frozen, AWAY),
    'table locked': (table_locked, 'another session has locked the table plants'),
    'standby away': (partial(waiting_for, 'nobody'), STANDBY),
}


@table('outage, reason', OUTAGES)
def test_outage_loses_no_acknowledged_plant(
    short_limits, database, url, far, proxy, outage, reason
):
    """In an outage each add is refused in time; then the store adds again, at once."""
    with load(database, url, far) as seen, outage(database, url, proxy):
        # Whoever was refused adds no plant that was sent before the outage.
        wait_until(lambda: len({name for name, _ in seen.failures}) == 8)
        acknowledged = len(seen.outcomes)
        seen.failures.clear()
        wait_until(lambda: reason in {reason for _, reason in seen.failures})
        assert_refused(None, far.ping)
        assert len(seen.outcomes) == acknowledged
    far.ping()


def test_sessions_that_end_lose_no_acknowledged_plant(database, url, store):
    """While its sessions end at any moment each id has one winner."""
    with load(database, url, store) as seen:
        for _ in range(30):
            database.terminate_sessions()
            wait_for_more(seen)


@pytest.fixture
def standby(database):
    """A synchronous standby of the server, whose commits wait for it."""
    with PostgreSQL(database) as standby, waiting_for('standby', database):
        state = 'SELECT sync_state FROM pg_stat_replication'
        wait_until(lambda: database.execute(state) == [('sync',)], 'it is synchronous')
        yield standby
    database.start()


@pytest.mark.parametrize('is_silent', [False, True], ids=['killed', 'silent'])
def test_failover_loses_no_acknowledged_plant(
    short_limits, database, url, proxy, standby, is_silent, caplog
):
    """A standby is only read, with a warning; once promoted the store adds to it."""
    copy = standby.own(url)
    hosts = proxy.url(url).replace('@', f'@127.0.0.1:{standby.port},')
    with open_store(hosts) as store, load(standby, copy, store):
        with open_store(copy, create=False) as other:
            wait_until(lambda: len(list(other)) > 8 and 'in_hot_standby' in caplog.text)
            assert_refused('the database is read-only', other.ping)
        if is_silent:  # as a machine without power
            proxy.stop()
        database.kill()
        standby.execute('SELECT pg_promote()')  # returns when it is done


def test_frozen_host_is_left_behind(database, url, proxy):
    """If a host hangs, an add is taken by the next one within five seconds."""
    hosts = proxy.url(url).replace('/postgres', f',127.0.0.1:{database.port}/postgres')
    with open_store(hosts) as store:
        store.add(FERN)
        proxy.stop()
        began = time.monotonic()
        assert_refused(AWAY, partial(store.add, MOSS))
        assert store.add(MOSS) is True
        assert time.monotonic() - began < LONGEST


def test_service_outlives_outages_of_its_database(tmp_path, database, url, proxy):
    """What needs no store is answered in an outage; then each worker adds again."""
    live, ready = request('GET', '/livez'), request('GET', '/readyz')
    with (
        Server(tmp_path, workers=2, PLANTS_STORE=proxy.url(url)) as server,
        server.connect() as waiting,
    ):
        proxy.stop()
        waiting.send(request(body=fern()))
        assert [server.ask(live).status for _ in range(8)] == [200] * 8
        assert not waiting.is_readable()
        proxy.go_on()
        assert waiting.receive().status == 200
        database.kill()
        assert_error(waiting.ask(request(body=fern())), 50300)
        database.start()
        wait_until(lambda: {server.ask(ready).status for _ in range(8)} == {200})
        assert server.ask(request(body=fern())).status == 200
    assert not re.search('Traceback|options', server.log)  # nor the URL


def test_ended_idle_session_fails_no_add(database, store):
    """A session that ended while it was idle is replaced, and no add fails."""
    for use in (lambda: store.add(FERN), store.ping) * 3:
        database.terminate_sessions()
        wait_until(lambda: not database.sessions())
        use()
    assert store.add(FERN) is False
    assert len(database.sessions()) == 1


@pytest.mark.parametrize('stored', [False, True], ids=['to insert', 'to compare'])
def test_lost_answer_is_no_success(database, url, far, proxy, stored, monkeypatch):
    """If the connection is lost between sending and answer, the add is refused."""
    monkeypatch.setattr(postgresql.table, 'ASK_EVERY', PATIENCE)
    if stored:
        far.add(FERN)
    proxy.cut(after=int(stored))
    assert_refused(None, partial(far.add, FERN))
    assert far.add(FERN) is False
    assert database.execute('TABLE plants', url=url) == [FERN]


LOCKS = {
    'insert': "INSERT INTO plants VALUES (1, 'Fern')",
    'row': 'SELECT FROM plants WHERE id = 1 FOR UPDATE',
}


@pytest.mark.parametrize('kind', LOCKS)
def test_locked_plant_delays_no_other_add(database, url, store, kind):
    """While a row is locked, or not committed, its adds are refused; others go on."""
    store.add_many([FERN, MOSS] if kind == 'row' else [MOSS])
    with closing(psycopg.connect(database.own(url))) as other:
        other.execute(LOCKS[kind])
        with load(database, url, store) as seen:
            locked = 'another session has locked the plant'
            refused = partial(assert_refused, locked, partial(store.add, FERN))
            in_threads(refused, refused, lambda: store.add(MOSS))
        assert not seen.failures
        other.commit()
    wait_until(lambda: works(store.add, FERN))


PASSING = [  # a serialization failure; a row that is not visible yet; a demotion
    "RAISE '' USING ERRCODE = '40001'",
    'RETURN NULL',
    "PERFORM set_config('default_transaction_read_only', 'on', false)",
]


@pytest.mark.parametrize('act', PASSING)
def test_fault_that_passes_is_waited_for(database, url, store, act):
    """What ends soon, or in another session, only delays an add."""
    act = f"IF nextval('turn') < 4 THEN {act}; END IF"
    database.execute(f'CREATE SEQUENCE turn; {trigger(act)}', url=url)
    assert store.add(FERN) is True
    assert store.add(MOSS) is True


def test_full_disk_is_unavailable(database, url, store):
    """On a full disk adds are refused; once there is room they work again."""
    database.execute('TRUNCATE plants; CHECKPOINT', url=url)
    ((path,),) = database.execute("SELECT pg_relation_filepath('plants')", url=url)
    file = database.data / path
    assert not file.stat().st_size
    file.unlink()
    file.symlink_to('/dev/full')
    database.terminate_sessions()  # they may have the file open
    wait_until(lambda: not database.sessions())
    add = partial(store.add_many, [FERN, MOSS])
    for error in assert_refused('the database is out of room', add, add, add):
        assert 'No space left on device' in str(error)
    database.execute('TRUNCATE plants', url=url)  # makes a new file
    assert add() == [True, True]


def test_commit_that_is_cancelled_is_not_acknowledged(
    database, url, store, monkeypatch
):
    """If the wait for a standby is cancelled, no add or ping has succeeded."""
    store.add(FERN)
    store.ping()
    monkeypatch.setattr(postgresql, 'PROBE_EVERY', PATIENCE)

    waiting = "pg_stat_activity WHERE wait_event = 'SyncRep'"
    statement = f'SELECT pg_cancel_backend(pid) FROM {waiting}'
    cancel_commits = partial(database.execute, statement)
    with waiting_for('nobody', database):
        # The checkpointer tells the sessions, some time after the reload.
        is_away = partial(wait_until, lambda: not works(store.add, FERN))
        in_threads(is_away, partial(wait_until, cancel_commits))
        store.ping()  # anybody may ask, so of many pings few commit
        monkeypatch.setattr(postgresql, 'PROBE_EVERY', 0)
        for use in store.ping, partial(store.add, FERN), partial(store.add, MOSS):
            assert database.execute('TABLE plants', url=url) == [FERN]
            refusal = partial(assert_refused, STANDBY, use)
            in_threads(refusal, partial(wait_until, cancel_commits))
    assert store.add_many([FERN, MOSS]) == [False, False]


def test_want_of_memory_spends_the_connection(store, monkeypatch):
    """If a statement is interrupted, also at its end, the next has another session."""

    def execute(cursor, *_):
        cursor.connection.lock.acquire()  # as if its release had been interrupted
        raise MemoryError

    with monkeypatch.context() as change:
        change.setattr(psycopg.Cursor, 'execute', execute)
        assert_refused('the write was interrupted', partial(store.add, FERN))
    assert store.add(FERN) is True


def test_reader_that_stops_leaves_no_session(database, url, store, monkeypatch):
    """Nor half-way; a list that cannot go on never ends as if it were whole."""
    monkeypatch.setattr(postgresql.table, 'ASK_EVERY', 0)
    store.add_many(MANY)
    before = database.sessions()
    reader, other = iter(store), iter(store)
    assert next(reader) in MANY
    assert len(database.sessions() - before) == 1
    in_threads(reader.close)
    wait_until(lambda: database.sessions() == before)
    assert sorted(store) == MANY
    next(other)
    database.execute(f'DROP TABLE plants; {postgresql.table.CREATE}', url=url)
    assert_refused(None, partial(list, other))
