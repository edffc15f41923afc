"""The committer: plants that wait together share one append and one sync."""

import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from disk import Gate, assert_raise
from waiting import PATIENCE, in_threads, wait_until

from store import IdTaken, Plant, Scheduler, StoreClosed, StoreUnavailable, committer

LONG = 10**6  # seconds
FULL = StoreUnavailable('full')


class Commits(committer.CommittedStore, Scheduler):
    """A store whose calls take as long as a test wants, or fail; its own scheduler."""

    def __init__(self, above=LONG, within=LONG):
        self.before = {}  # from the name of a call to what may block or raise
        self.errors = {}  # from an id to what is wrong with it
        self.batches = []  # the ids of each append
        self.calls = []  # that have ended
        super().__init__('commits', scheduler=self)
        self.gather_above, self.gather_within = above, within

    def connect(self, ring, wake):
        def wakes(calls):
            wake(calls)
            self._do('wake')

        return lambda: (self._do('ring'), ring()), wakes

    def start_thread(self, run, arguments):
        self._do('start')
        super().start_thread(lambda: (run(), self._do('end')), arguments)

    def _open_backend(self):
        self._do('open')
        ping, close = partial(self._do, 'ping'), partial(self._do, 'close')
        return SimpleNamespace(append=self._append, ping=ping, close=close)

    def _append(self, batch):
        self.batches.append([entry.item.id for entry in batch])
        self._do('append')
        for entry in batch:
            entry.new, entry.error = True, self.errors.pop(entry.item.id, entry.error)
        return partial(self._do, 'sync')

    def _do(self, name):
        self.before.get(name, lambda: None)()
        self.calls.append(name)

    def __iter__(self):
        return iter(())

    def put(self, *ids, size=1):
        """Add one plant, or several by ``add_many``."""
        plants = [Plant(id, 'x' * size) for id in ids]
        return self.add(*plants) if len(plants) == 1 else self.add_many(plants)

    def put_behind(self, gate, *jobs):
        """Run a job that blocks at a gate, and others that queue behind it."""

        def follow(place, job):
            wait_until(lambda: gate.held and self.calls.count('ring') == place)
            job()

        followers = enumerate([*jobs[1:], gate.set], self.calls.count('ring') + 1)
        in_threads(jobs[0], *(partial(follow, *follower) for follower in followers))


@pytest.mark.parametrize('where', ['open', 'sync'])
@pytest.mark.parametrize(
    ('sizes', 'batches'),
    [
        ([1] * 9, [[1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        ([40, 40, 40, 40], [[1, 2], [3, 4]]),
        ([100, 1, 99, 1, 101, 1], [[1], [2, 3], [4], [5], [6]]),
    ],
)
def test_plants_that_wait_are_a_batch(monkeypatch, where, sizes, batches):
    """Plants that wait are one batch, in their order; it has at most BATCH_SIZE."""
    monkeypatch.setattr('store.base.BATCH_SIZE', 100)
    with Commits() as store:
        seen, gate = [], Gate()
        store.on_sync = lambda *sync: seen.append((sync[0], sync[1] >= 0))
        store.before[where] = gate
        sizes = enumerate([1, *sizes])
        store.put_behind(gate, *(partial(store.put, id, size=it) for id, it in sizes))
        assert store.batches == [[0], *batches]
        assert seen == [(len(batch), True) for batch in store.batches]
        store.on_sync = Mock(side_effect=ZeroDivisionError)  # as it must not
        assert store.put(99) is True


def test_second_attempt_forgets_what_the_first_has_found(monkeypatch):
    """A plant was refused for another one, and the thread ended for want of memory."""
    monkeypatch.setattr(committer, 'LOOK_EVERY', 0.01)
    monkeypatch.setattr(committer.log, 'error', Mock(side_effect=MemoryError))
    with Commits() as store:
        store.errors[1] = IdTaken(1)
        store.before['sync'] = Mock(side_effect=[MemoryError, None])
        assert (store.put(1), store.batches) == (True, [[1], [1]])


@pytest.mark.parametrize('where', ['append', 'sync'])
@pytest.mark.parametrize('error', [FULL, SystemExit(), MemoryError()], ids=repr)
@pytest.mark.parametrize('outage', [LONG, 0])
def test_failure_reaches_all_callers_of_the_batch(monkeypatch, where, error, outage):
    """If it took long, those who wait behind them hear the same reason."""
    monkeypatch.setattr(committer, 'OUTAGE', outage)
    with Commits() as store:
        gate, raised = Gate(), {}

        def fail_first():
            gate()
            if len(store.batches) == 1:
                raise error

        def put(*ids):
            try:
                store.put(*ids)
            except Exception as ex:  # a SystemExit would end the thread of each caller
                raised[ids] = ex.reason

        store.before[where] = fail_first
        puts = [(0, 1), (2,), (3, 4)]
        store.put_behind(gate, *(partial(put, *ids) for ids in puts))
        assert store.batches == ([[0, 1], [2, 3, 4]] if outage else [[0, 1]])
        assert raised.keys() == ({(0, 1)} if outage else {*puts})
        assert len({*raised.values()}) == 1
        assert store.put(4) is True


def test_entry_fails_alone():
    """What is wrong with one plant is told to its caller; that of a batch hides it."""
    with Commits() as store:
        error = store.errors[1] = IdTaken(1)
        assert store.put(1, 2) == [error, True]
        store.errors[1], store.before['sync'] = error, Mock(side_effect=FULL)
        assert_raise(StoreUnavailable, partial(store.put, 1, 2), match='full')


def test_ring_and_wake_that_interrupts_have_cost(monkeypatch):
    """Others go on a second later, and hear how their batch has ended."""
    monkeypatch.setattr(committer, 'LOOK_EVERY', 0.01)
    monkeypatch.setattr(Commits, 'connect', lambda *_: (list, list))
    with Commits() as store:
        assert all(map(store.put, range(9)))
        store.before['append'] = Mock(side_effect=ZeroDivisionError())
        assert_raise(StoreUnavailable, partial(store.put, 10, 11), match='interrupted')
        store.before['append'] = partial(time.sleep, 0.1)
        assert store.put(12)


@pytest.fixture
def slow(monkeypatch):
    """Return a function that makes a sync seem to take a million seconds."""
    clock, passed = committer.perf_counter, []
    monkeypatch.setattr(committer, 'perf_counter', lambda: clock() + LONG * len(passed))
    return lambda: passed.append(1)


def test_gather_waits_for_the_whole_crowd(slow):
    """After a slow sync the next batch has who waited already and who was woken."""
    gate = Gate()
    with Commits(0) as store:

        def again(id):
            for number in range(4):
                store.put(id + 100 * number)
                time.sleep(0.05)  # a batch that did not wait would begin meanwhile

        def before_sync():
            gate()
            slow()
            if len(store.batches) == 4:
                store.gather_above = 2 * LONG

        store.before['sync'] = before_sync
        store.put_behind(gate, *(partial(again, id) for id in range(3)))
        assert [*map(len, store.batches)][:4] == [1, 3, 3, 3]


@pytest.mark.parametrize('limits', [(LONG, LONG), (0, LONG), (0, 0.01)])
def test_gather_ends_without_the_crowd(limits, slow):
    """If the crowd does not come back, one caller waits only for so long."""
    with Commits(*limits) as store:
        gate = Gate()
        store.before['sync'] = lambda: (gate(), limits[1] < 1 and slow())
        store.put_behind(gate, *(partial(store.put, id) for id in range(9)))
        assert store.put(9) is True


def test_caller_leaves_in_time(monkeypatch):
    """Who waits too long hears why, and is not stored; a bulk add waits."""
    monkeypatch.setattr(committer, 'WAIT_WITHIN', 0.05)
    with Commits() as store:
        gate = store.before['append'] = Gate()

        def leave():
            gate.wait_for()
            assert_raise(StoreUnavailable, partial(store.put, 3), match='in time')
            gate.set()

        in_threads(partial(store.put, 1, 2), leave)
        assert (store.put(4), store.batches) == (True, [[1, 2], [4]])


def test_pings_that_wait_share_one():
    """A ping has not begun before it was called; its failure reaches no add."""
    with Commits() as store:
        store.before['append'] = gate = Gate()
        store.before['ping'] = Mock(side_effect=FULL)
        refused = partial(assert_raise, StoreUnavailable, store.ping, match='full')
        jobs = partial(store.put, 0), refused, partial(store.put, 1), refused
        store.put_behind(gate, *jobs)
        assert store.batches == [[0], [1]]
        del store.before['ping']
        store.ping()
        assert store.calls.count('ping') == 1


@pytest.mark.parametrize('where', ['open', 'sync'])
@pytest.mark.parametrize('stuck', [False, True], ids=['slow', 'stuck'])
def test_close_waits_for_what_is_in_progress(monkeypatch, where, stuck):
    """It waits for a limited time; who waits behind it is refused, and all after it."""
    monkeypatch.setattr(committer, 'CLOSE_WITHIN', 0.05 if stuck else PATIENCE)
    store, gate, closed = Commits(), Gate(), threading.Event()
    store.before[where] = gate

    def refused():
        gate.wait_for()
        assert_raise(StoreClosed, partial(store.put, 1))

    def close():
        wait_until(lambda: store.calls.count('ring') == 2)
        store.close()
        closed.set()

    def release():
        wait_until(lambda: store._closed)
        # A close that did not wait would end long before the short timeout.
        assert closed.wait(PATIENCE if stuck else 0.2) == stuck
        gate.set()

    in_threads(partial(store.put, 0), refused, close, release)
    wait_until(lambda: store.calls.count('close'), 'the backend is closed')
    assert_raise(StoreClosed, partial(store.put, 2), store.ping, store.load)
    store.close()


def test_thread_that_cannot_be_started(monkeypatch):
    """It is told, and tried again by the next caller."""
    with Commits() as store, monkeypatch.context() as patch:
        patch.setattr(Commits, 'start_thread', Mock(side_effect=RuntimeError('none')))
        assert_raise(StoreUnavailable, partial(store.put, 0), match='none')
        patch.undo()
        assert store.put(1) is True
    assert store.batches == [[1]]


def test_thread_that_ends_is_followed_by_another(monkeypatch):
    """Who waits is served; a close leaves nothing open if there is no other."""
    monkeypatch.setattr(committer, 'LOOK_EVERY', 0.01)
    with Commits() as store:
        store.before['sync'] = gate = Gate()
        store.before['wake'] = Mock(side_effect=MemoryError())
        store.put_behind(gate, partial(store.put, 0), partial(store.put, 1))
        assert store.batches == [[0], [1]]
        wait_until(lambda: store.calls.count('start') == store.calls.count('end'))
    assert store.calls.count('close')
