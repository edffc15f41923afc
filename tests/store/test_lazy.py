"""A store opens when it is first used, once in each process, and shares its pings."""

import os
import threading

import pytest

from store import StoreClosed
from store import StoreUnavailable
from store.lazy import LazyStore
from store.scheduler import Threads
from store.testing import in_child
from store.testing import in_threads
from store.testing import wait_until


class Backend:
    """What a store of these tests holds open, and notes what is done with it.

    Attributes:
        process: The process that opened it.
        pings: How many pings have ended.
        most: How many pings ran at once.
    """

    def __init__(self):
        self.process = os.getpid()
        self.pings = self.now = self.most = 0
        self.abandoned = self.closed = False
        self.before_ping = lambda: None

    def ping(self):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            self.before_ping()
        finally:
            self.now -= 1
            self.pings += 1

    def abandon(self):
        self.abandoned = True

    def close(self):
        self.closed = True


class Lock:
    """A lock that notes each thread that comes to it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.came = []

    def __enter__(self):
        self.came.append(threading.current_thread())
        return self._lock.__enter__()

    def __exit__(self, *exc_info):
        return self._lock.__exit__(*exc_info)


class Scheduler(Threads):
    """Callers that are threads, and are seen when they come to a lock."""

    def lock(self):
        return Lock()


class Store(LazyStore):
    """A store that opens backends of these tests."""

    __iter__ = None

    def __init__(self):
        super().__init__(scheduler=Scheduler())
        self.opened = []

    def add(self, plant):
        return self._backend()

    def _open_backend(self):
        self.opened.append(Backend())
        return self.opened[-1]


@pytest.fixture
def store():
    """A store that nobody has used yet."""
    return Store()


def test_opened_once(store):
    """Of many who use a store first, one opens it, and all use what that one opened."""
    used = []

    def open_late():
        wait_until(lambda: len(store._process().opening.came) == 4)
        return Store._open_backend(store)

    store._open_backend = open_late
    in_threads(*[lambda: used.append(store.add(None))] * 4)
    assert used == store.opened * 4


def test_opened_again_after_a_failure(store):
    """A store that could not open is opened again by the next who uses it."""
    store._open_backend = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        store.add(None)
    del store._open_backend
    assert store.add(None) is store.opened[0]


def test_opened_again_in_a_child(store):
    """A child of a fork uses nothing that its parent opened, and closes its copies."""
    inherited = store.add(None)

    def child():
        assert store.add(None).process == os.getpid()
        assert store.add(None) is store.add(None)
        assert inherited.abandoned
        assert not inherited.closed

    in_child(child)
    assert store.add(None) is inherited
    assert not inherited.abandoned


def test_fork_while_another_thread_opens(store):
    """A lock that somebody holds at a fork holds nobody up in the child."""
    thread = threading.Thread(target=store.add, args=[None])
    with store._process().opening:
        thread.start()
        in_child(lambda: store.add(None))
    thread.join()


def test_closed(store):
    """A closed store has closed what it had opened, and opens nothing any more."""
    backend = store.add(None)
    store.close()
    store.close()
    assert backend.closed
    with pytest.raises(StoreClosed):
        store.add(None)
    with pytest.raises(StoreClosed):
        store.ping()


def test_one_ping_at_a_time(store):
    """However many ask whether a store is ready, and however slow it is, one ping runs.

    Those who wait share the answer of a ping that began after they came.
    """
    backend = store.add(None)
    held = threading.Event()
    backend.before_ping = held.wait
    threads = [threading.Thread(target=store.ping) for _ in range(8)]
    threads[0].start()
    wait_until(lambda: backend.now)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(store._process().pinging.came) == len(threads))
    held.set()
    for thread in threads:
        thread.join()
    assert backend.most == 1
    assert backend.pings == 2


@pytest.mark.parametrize('error', [StoreUnavailable('full'), KeyboardInterrupt()])
def test_failed_ping(store, error):
    """Whoever shares a ping that failed fails, and the next ping tries again."""
    backend = store.add(None)
    held = threading.Event()
    raised = []

    def fail():
        held.wait()
        raise error

    def ask():
        try:
            store.ping()
        except BaseException as ex:
            raised.append(ex)

    backend.before_ping = held.wait
    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    wait_until(lambda: backend.now)
    backend.before_ping = fail
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(store._process().pinging.came) == len(threads))
    held.set()
    for thread in threads:
        thread.join()
    assert backend.pings == 2
    assert len(raised) == 2
    assert raised[0] is error
    assert isinstance(raised[1], StoreUnavailable)
    backend.before_ping = lambda: None
    store.ping()


def test_observers(store):
    """Every observer of a store is told of each sync."""
    seen = []
    store.observe_syncs(lambda *sync: seen.append(('one', *sync)))
    store.observe_syncs(lambda *sync: seen.append(('two', *sync)))
    store._report_sync(3, 0.5)
    assert seen == [('one', 3, 0.5), ('two', 3, 0.5)]
