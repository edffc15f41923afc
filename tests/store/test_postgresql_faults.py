"""What happens to a PostgreSQL store while its database, or the way there, fails.

The servers are real, and so are their faults.
"""

import itertools
import random
import signal
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from contextlib import suppress

import psycopg
import pytest
from postgresql import refused
from proxy import Proxy

from store import IdTaken
from store import Plant
from store import StoreClosed
from store import StoreUnavailable
from store import open_store
from store.postgresql import limits
from store.testing import in_child
from store.testing import in_threads
from store.testing import processes
from store.testing import wait_until

FERN = Plant(1, 'Fern')
MOSS = Plant(2, 'Moss', 'shade')
MANY = [Plant(id, 'Fern' * 100) for id in range(20_000)]
# Seconds: an answer that does not come, and the attempt to cancel it; who has waited
# behind that may be the next to try. And a busy machine.
LONGEST = limits.ANSWER_WITHIN + limits.CANCEL_WITHIN + limits.CONNECT_WITHIN + 2
AT_ONCE = 0.5
# How soon a store adds again when the server does.
BACK = limits.RETRY_AFTER + 1


@pytest.fixture
def store(url):
    """A store without plants, which is in use."""
    with open_store(url) as store:
        store.ping()
        yield store


@pytest.fixture
def proxy(server):
    """What stands between the store ``far`` and its server."""
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def far(server, url, proxy):
    """A store without plants, which is in use through a proxy."""
    with open_store(url.replace(str(server.port), str(proxy.port))) as store:
        store.ping()
        yield store


@pytest.fixture
def short(monkeypatch):
    """Let nobody wait longer than it takes to see that he does."""
    monkeypatch.setattr(limits, 'ANSWER_WITHIN', 1)


@contextmanager
def session(url):
    """A session of somebody else, who decides when his transaction ends."""
    with psycopg.connect(url) as connection:
        yield connection
        connection.rollback()


class Load:
    """Threads that add plants of their own all the time, and repeat what fails."""

    def __init__(self, store, names='abcdefgh'):
        self._store = store
        self.ended = False
        self.stored = []
        self.longest = 0
        self.failures = 0
        self._threads = [
            threading.Thread(target=self._add_all, args=pair)
            for pair in enumerate(names)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self.wait_for_more()
        return self

    def __exit__(self, *exc_info):
        self.ended = True
        for thread in self._threads:
            thread.join()

    def wait_for_more(self):
        """Return when each thread, on average, has had a plant stored."""
        goal = len(self.stored) + len(self._threads)
        wait_until(lambda: len(self.stored) >= goal)

    def _add_all(self, place, name):
        for number in itertools.count():
            plant = Plant(10 + 100 * number + place, name)
            while not self.ended and not self._add(plant):
                time.sleep(0.01)
            if self.ended:
                return

    def _add(self, plant):
        began = time.monotonic()
        try:
            self._store.add(plant)
        except StoreUnavailable:
            self.failures += 1
            return False
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        self.stored.append(plant)
        return True


def rows(server, url):
    """Return what is stored, read without the store."""
    return [Plant(*row) for row in server.execute('TABLE plants', url=url)]


def assert_stored(server, url, load):
    """Check that nothing that was acknowledged is lost, and nothing is there twice."""
    stored = rows(server, url)
    assert len(stored) == len(set(stored))
    assert set(load.stored) <= set(stored)


@contextmanager
def configured(server, setting, value, otherwise):
    """Let a setting of the server have a value for a while."""

    def let(value):
        server.configure(f"{setting} = '{value}'\n")
        wait_until(lambda: server.execute(f'SHOW {setting}') == [(value,)])

    let(value)
    try:
        yield
    finally:
        let(otherwise)


def with_setting(url, setting):
    """Return a URL whose sessions have one more setting."""
    return f'{url}%20-c{setting.replace("=", "%3D")}'


# ---- the server goes, and comes back


@pytest.mark.parametrize('end', [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL])
def test_restart(server, url, store, end):
    """A restart loses nothing that was acknowledged, and the store goes on after it."""
    with Load(store) as load:
        server.stop(end)
        try:
            with refused(within=AT_ONCE):
                store.ping()
        finally:
            server.start()
        began = time.monotonic()
        load.wait_for_more()
        assert time.monotonic() - began < BACK
        assert load.longest < limits.CONNECT_WITHIN
        assert load.failures
    assert_stored(server, url, load)
    store.ping()


def test_sessions_end(server, url, store):
    """When all sessions are ended the store makes others, and only a moment is lost."""
    with Load(store) as load:
        for _ in range(10):
            server.terminate_sessions()
            load.wait_for_more()
        assert load.longest < BACK
    assert_stored(server, url, load)
    assert len(server.sessions()) <= limits.MOST_CONNECTIONS


def test_idle_sessions_end(server, store):
    """Sessions that ended while they were idle are replaced, and no add fails."""
    pool = store._backend()._pool
    for use in (lambda: store.add(FERN), store.ping):
        with pool.lend(), pool.lend(), pool.lend():
            pass
        assert len(server.sessions()) == 3
        server.terminate_sessions()
        use()
    assert store.add(FERN) is False


# ---- the server hangs, or the network


def test_hang(server, url, store):
    """While the server hangs nobody waits for long, and later ones do not wait."""
    store.add(FERN)
    with Load(store) as load:
        server.pause()
        try:
            wait_until(lambda: load.failures >= 8)
            assert load.longest < LONGEST
            count = threading.active_count()
            for _ in range(20):
                with refused():
                    store.add(MOSS)
            assert threading.active_count() <= count
        finally:
            server.resume()
        began = time.monotonic()
        load.wait_for_more()
        assert time.monotonic() - began < limits.CONNECT_WITHIN + BACK
    assert_stored(server, url, load)


def test_hang_from_the_start(url, proxy, server):
    """A server that hangs at the first use of the store holds up one at a time."""
    proxy.stop()
    waits = []

    def add():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.add(FERN)
        waits.append(time.monotonic() - began)

    with open_store(url.replace(str(server.port), str(proxy.port))) as store:
        in_threads(*[add] * 20)
        assert max(waits) < 2 * limits.CONNECT_WITHIN + 1
        proxy.go_on()
        wait_until(lambda: adds(store))


def adds(store):
    """Whether a store adds."""
    with suppress(StoreUnavailable):
        store.add(FERN)
        return True
    return False


@pytest.mark.parametrize('after', [None, 1], ids=['to insert', 'to compare'])
def test_black_hole(far, proxy, short, after):
    """Who gets no answer at all is told so in time, whichever statement it is for."""
    far.add(FERN)
    proxy.stop(after)
    began = time.monotonic()
    with refused('there is no connection to the database'):
        far.add(FERN)
    longest = limits.ANSWER_WITHIN + limits.CANCEL_WITHIN + AT_ONCE
    assert time.monotonic() - began < longest
    with refused('there is no connection to the database', AT_ONCE):
        far.add(FERN)
    proxy.go_on()
    wait_until(lambda: adds(far))
    assert far.add(FERN) is False


def test_one_tries(far, proxy, short):
    """While nothing answers, one caller tries, and the others fail at once."""
    far.add(FERN)
    proxy.stop()
    with pytest.raises(StoreUnavailable):
        far.add(MOSS)
    time.sleep(limits.RETRY_AFTER)
    waits = []

    def ping(number):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            far._backend().ping()
        waits.append(time.monotonic() - began)

    in_threads(*(lambda n=n: ping(n) for n in range(10)))
    assert sum(wait > AT_ONCE for wait in waits) == 1
    proxy.go_on()
    wait_until(lambda: adds(far))


@pytest.mark.parametrize('stored', [False, True])
def test_lost_answer_is_asked_for_again(server, url, far, proxy, stored):
    """After a lost answer the store asks once more, and never answers with a guess."""
    if stored:
        far.add(FERN)
    proxy.cut()
    assert far.add(FERN) is False  # the first try has stored it
    proxy.cut()
    with pytest.raises(IdTaken):
        far.add(FERN._replace(name='Moss'))
    proxy.cut(times=2)
    with refused('there is no connection to the database', AT_ONCE):
        far.add(FERN)
    wait_until(lambda: adds(far))
    assert rows(server, url) == [FERN]


def test_close_while_it_hangs(far, proxy):
    """A store can be closed at any time, and does not wait for the server."""
    proxy.stop()
    adding = threading.Thread(target=lambda: adds(far))
    adding.start()
    wait_until(lambda: far._backend()._pool._in_use)
    began = time.monotonic()
    far.close()
    assert time.monotonic() - began < AT_ONCE
    proxy.go_on()
    adding.join()
    with pytest.raises(StoreClosed):
        far.add(MOSS)


# ---- others are in the way


@pytest.mark.parametrize('end', ['commit', 'rollback'])
def test_uncommitted(server, url, store, end, monkeypatch):
    """Whose id somebody else is about to take waits for him, but not for ever."""
    with session(url) as other:
        other.execute("INSERT INTO plants VALUES (1, 'Moss')")
        with monkeypatch.context() as patch:
            patch.setattr(limits, 'LOCKED_WITHIN', 0.2)
            with refused('another session has locked the plant', within=2):
                store.add(FERN)
        adding = []

        def add():
            try:
                adding.append(store.add(FERN))
            except IdTaken as ex:
                adding.append(ex.id)

        thread = threading.Thread(target=add)
        thread.start()
        wait_until(lambda: waiting(server))
        assert store.add(MOSS) is True  # nobody else waits for that
        getattr(other, end)()
        thread.join()
        assert adding == [1 if end == 'commit' else True]


def waiting(server):
    """Return the sessions of stores that wait for somebody's lock."""
    return server.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'plants' "
        "AND wait_event_type = 'Lock'"
    )


LOCKS = {
    'lock': 'SELECT FROM plants WHERE id = 1 FOR UPDATE',
    'update': "UPDATE plants SET tag = 'dry' WHERE id = 1",
    'delete': 'DELETE FROM plants WHERE id = 1',
    'insert': "INSERT INTO plants VALUES (1, 'Fern')",
}


@pytest.mark.parametrize('lock', LOCKS)
def test_locked_row_delays_no_other_add(url, store, lock):
    """While one row is locked and clients keep repeating it, other adds are fast."""
    store.add(MOSS)
    if lock != 'insert':
        store.add(FERN)
    repeats = []
    with session(url) as other:
        other.execute(LOCKS[lock])
        with Load(store) as load:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                repeats.append(threading.Thread(target=adds, args=[store]))
                repeats[-1].start()
                time.sleep(0.03)
            began = time.monotonic()
            assert store.add(MOSS) is False
            assert time.monotonic() - began < 1.5
        assert load.longest < 1.5
        assert len(load.stored) > 300  # not slow again and again
        assert not load.failures
        assert any(thread.is_alive() for thread in repeats)
        other.rollback()
        for thread in repeats:
            thread.join()
    assert store.add(FERN) is False


def test_locked_table(url, store, monkeypatch):
    """While the table is locked adds are refused in time; then the store goes on."""
    monkeypatch.setattr(limits, 'MOST_LOCKED_IDS', 10)
    plants = [Plant(id, 'Ivy') for id in range(20)]
    with session(url) as other:
        other.execute('LOCK TABLE plants')

        def add(plant):
            with refused('another session has locked the plant'):
                store.add(plant)

        in_threads(*(lambda plant=plant: add(plant) for plant in plants))
        with refused('another session has locked the plant', within=5):
            store.add_many(MANY[:200])
    in_threads(*(lambda plant=plant: store.add(plant) for plant in plants))
    assert store.add_many(plants) == [False] * 20


def test_deadlock(server, url, monkeypatch):
    """Who loses a deadlock tries again."""
    monkeypatch.setattr(limits, 'LOCK_WITHIN', LONGEST)
    with (
        open_store(with_setting(url, 'deadlock_timeout=500ms')) as store,
        session(url) as other,
    ):
        store.add_many([FERN, MOSS])
        other.execute("SET deadlock_timeout = '10s'")
        other.execute('SELECT FROM plants WHERE id = 2 FOR UPDATE')
        told = []
        thread = threading.Thread(
            target=lambda: told.extend(store.add_many([FERN, MOSS]))
        )
        thread.start()
        wait_until(lambda: waiting(server))
        other.execute('SELECT FROM plants WHERE id = 1 FOR UPDATE')
        other.rollback()
        thread.join()
        assert told == [False, False]
    assert 'deadlock detected' in server.log


def test_no_deadlock(server, store):
    """Plants that come in any order are never in each other's way."""
    before = server.log.count('deadlock detected')

    def add_all(seed):
        plants = [Plant(id, 'Fern') for id in range(200)]
        for _ in range(10):
            random.Random(seed).shuffle(plants)
            store.add_many(plants)

    in_threads(*(lambda seed=seed: add_all(seed) for seed in range(4)))
    assert server.log.count('deadlock detected') == before


def test_not_serializable(server, url, monkeypatch):
    """Who could not be serialized tries again, and then sees what was in the way."""
    monkeypatch.setattr(limits, 'LOCK_WITHIN', LONGEST)
    isolation = 'default_transaction_isolation=serializable'
    with open_store(with_setting(url, isolation)) as store:
        store.ping()
        with session(url) as other:
            other.execute("INSERT INTO plants VALUES (1, 'Moss')")
            told = []

            def add():
                told.extend(store.add_many([FERN, MOSS]))

            thread = threading.Thread(target=add)
            thread.start()
            wait_until(lambda: waiting(server))
            other.commit()
            thread.join()
        assert isinstance(told[0], IdTaken)
        assert told[1] is True
    assert 'could not serialize access' in server.log


TRIGGER = (
    'CREATE SEQUENCE turn; '
    "CREATE FUNCTION act() RETURNS trigger AS $$BEGIN IF nextval('turn') {when} THEN "
    '{act}; END IF; RETURN NEW; END$$ LANGUAGE plpgsql; '
    'CREATE TRIGGER act BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()'
)


@pytest.mark.parametrize(
    'act',
    ["RAISE 'conflict' USING ERRCODE = '40001'", 'RETURN NULL'],
    ids=['conflict', 'hidden'],
)
def test_attempts(server, url, store, act):
    """What is in the way for a moment is waited for; what stays is reported."""
    server.execute(TRIGGER.format(when='< 4', act=act), url=url)
    assert store.add(FERN) is True
    server.execute('DROP TRIGGER act ON plants', url=url)
    server.execute('DROP SEQUENCE turn; DROP FUNCTION act', url=url)
    server.execute(TRIGGER.format(when='> 0', act=act), url=url)
    reason = 'the database is busy with other changes of the same plants'
    with refused(reason, 2):
        store.add(MOSS)


def test_warning_before_an_error_is_forgotten(server, url, store):
    """A warning that came with a refused plant is not held against the next one."""
    server.execute(
        'CREATE FUNCTION act() RETURNS trigger AS '
        "$$BEGIN IF NEW.name = 'bad' THEN RAISE WARNING 'soon'; RAISE 'no'; END IF; "
        'RETURN NEW; END$$ LANGUAGE plpgsql; '
        'CREATE TRIGGER act BEFORE INSERT ON plants FOR EACH ROW '
        'EXECUTE FUNCTION act()',
        url=url,
    )
    with refused('a rule of the table plants does not permit it'):
        store.add(Plant(9, 'bad'))
    assert store.add(FERN) is True


def test_full(server, url, store):
    """On a full disk plants are refused; when there is room they are taken."""
    server.execute('CHECKPOINT')
    ((path,),) = server.execute("SELECT pg_relation_filepath('plants')", url=url)
    file = server.data / path
    assert not file.stat().st_size
    file.unlink()
    file.symlink_to('/dev/full')
    server.terminate_sessions()  # they may have the file open
    with suppress(StoreUnavailable):
        store.ping()
    for _ in range(3):
        with refused('the database is out of room', AT_ONCE) as caught:
            store.add_many([FERN, MOSS])
        assert 'No space left on device' in caught.value.detail
    server.execute('TRUNCATE plants', url=url)  # which makes another file
    assert store.add_many([FERN, MOSS]) == [True, True]
    assert sorted(rows(server, url)) == [FERN, MOSS]


def test_read_only(server, store):
    """A primary that becomes read-only is left, and taken up when it is one again."""
    store.add(FERN)
    with configured(server, 'default_transaction_read_only', 'on', 'off'):
        with pytest.raises(StoreUnavailable, match='read-only'):
            store.add(MOSS)
        assert not server.sessions()
        with pytest.raises(StoreUnavailable, match='read-only'):
            store.ping()
    wait_until(lambda: adds(store))
    assert store.add(MOSS) is True


# ---- a synchronous standby that is away


def standby_away(server):
    """Let every commit wait for a standby that does not come."""
    return configured(server, 'synchronous_standby_names', 'nobody', '')


def waiting_for_standby(server):
    """Return the sessions whose commit waits for a standby."""
    return server.execute(
        "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    )


@pytest.mark.parametrize('stored', [False, True])
@pytest.mark.parametrize('messages', ['notice', 'error'])
def test_cancelled_commit(server, url, messages, stored):
    """A commit that is cancelled while it waits for a standby is not acknowledged."""
    with open_store(with_setting(url, f'client_min_messages={messages}')) as store:
        store.ping()
        if stored:
            store.add(FERN)
        with standby_away(server):
            told = []

            def add():
                with refused('the database does not say whether the plant is safe'):
                    store.add(FERN)
                told.append('refused')

            thread = threading.Thread(target=add)
            thread.start()
            wait_until(lambda: waiting_for_standby(server))
            for (pid,) in waiting_for_standby(server):
                server.execute('SELECT pg_cancel_backend(%s)', pid)
            thread.join()
            assert told == ['refused']
            assert rows(server, url) == [FERN]
        assert store.add(FERN) is False


def test_standby_is_away(server, url, store, short):
    """While a standby is away nothing is acknowledged, and the server is not filled."""
    store.add(FERN)
    with standby_away(server):
        refusals = []
        end = time.monotonic() + 4

        def add_all(plant):
            while time.monotonic() < end:
                with pytest.raises(StoreUnavailable):
                    store.add(plant)
                refusals.append(plant)
                time.sleep(0.02)

        plants = [FERN, MOSS, *(Plant(id, 'Ivy') for id in range(3, 9))]
        in_threads(*(lambda plant=plant: add_all(plant) for plant in plants))
        # FERN was safe before, and MOSS is visible, but who reads does not know that.
        assert {FERN, MOSS} <= set(rows(server, url)) & set(refusals)
        assert len(server.sessions()) <= limits.MOST_CONNECTIONS
        assert len(refusals) > 100
    wait_until(lambda: adds(store))
    assert store.add_many([FERN, MOSS]) == [False, False]


# ---- reading


def test_reader_leaves(server, store):
    """A reader that stops half-way leaves no session behind, nor a thing undone."""
    store.add_many(MANY)
    before = server.sessions()
    reader = iter(store)
    assert next(reader) in MANY
    assert len(server.sessions() - before) == 1
    in_threads(reader.close)
    wait_until(lambda: server.sessions() == before)
    assert sorted(store) == MANY


def test_reader_is_slow(store, monkeypatch):
    """A reader may take longer than a statement, and adds go on."""
    store.add_many(MANY)
    monkeypatch.setattr(limits, 'ANSWER_WITHIN', 0.5)
    reader = iter(store)
    first = next(reader)
    store.add(Plant(-1, 'Moss'))
    time.sleep(0.6)
    assert sorted([first, *reader]) == MANY


def test_session_of_reader_ends(server, store):
    """A reader whose session ends is told so, and is not told that this was all."""
    store.add_many(MANY)
    reader = iter(store)
    next(reader)
    server.terminate_sessions()
    with pytest.raises(StoreUnavailable):
        list(reader)


# ---- processes


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_fork(server, store):
    """A child of a fork has sessions of its own, and leaves those of its parent."""
    with Load(store):
        pass
    sessions = server.sessions()

    def use():
        for plant in (FERN, MOSS):
            store.add(plant)
        assert len(server.sessions() - sessions) == 1

    in_child(use)
    in_child(lambda: None)
    assert server.sessions() == sessions
    with Load(store):
        pass
    assert sessions <= server.sessions()


ADDER = """
import random
import sys
import time
from store import IdTaken
from store import Plant
from store import StoreUnavailable
from store import open_store

url, name = sys.argv[1:]
chance = random.Random(name)
with open_store(url) as store:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        count = chance.randrange(9)
        plants = [Plant(chance.randrange(300), name) for _ in range(count)]
        try:
            for plant, new in zip(plants, store.add_many(plants), strict=True):
                if not isinstance(new, IdTaken):
                    print(plant.id)
        except StoreUnavailable:
            pass
"""


def test_everything_at_once(server, url, store):
    """Each id has one winner, whatever is added by whom while sessions are killed."""
    won = defaultdict(set)
    lost = defaultdict(set)
    ended = threading.Event()

    def add_all(name):
        chance = random.Random(name)
        while not ended.is_set():
            plants = [Plant(chance.randrange(300), name) for _ in range(5)]
            with suppress(StoreUnavailable):
                if chance.random() < 0.5:
                    for plant, new in zip(plants, store.add_many(plants), strict=True):
                        (lost if isinstance(new, IdTaken) else won)[plant.id].add(name)
                for plant in plants:
                    try:
                        store.add(plant)
                        won[plant.id].add(name)
                    except IdTaken:
                        lost[plant.id].add(name)

    def kill():
        while any(adder.poll() is None for adder in adders):
            for pid in server.sessions():
                if random.random() < 0.2:
                    server.execute('SELECT pg_terminate_backend(%s)', pid)
            time.sleep(0.02)
        ended.set()

    with processes(ADDER, *((url, name) for name in 'xyz')) as adders:
        in_threads(kill, *(lambda name=name: add_all(name) for name in 'abcdef'))
        for adder, name in zip(adders, 'xyz', strict=True):
            output, _ = adder.communicate()
            assert adder.returncode == 0
            for line in output.split():
                won[int(line)].add(name)
    stored = rows(server, url)
    winners = {plant.id: {plant.name} for plant in stored}
    assert len(stored) == len(winners)
    for id, names in won.items():
        assert names == winners[id]
    for id, names in lost.items():
        assert not names & winners[id]
    assert len(won) > 200
