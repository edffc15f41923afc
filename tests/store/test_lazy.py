"""A lazy store opens at its first use, once per process, and shares pings."""

import threading
from unittest.mock import Mock

import pytest

from store import StoreUnavailable
from store.lazy import LazyStore
from store.scheduler import THREADS
from store.testing.waiting import PATIENCE, in_child, in_threads, wait_until


class Backend:
    """The backend of the stores in these tests; notes the pings."""

    def __init__(self):
        self.pings = 0  # that have ended
        self.now = self.most = 0  # that run at once
        self.before_ping = lambda: None

    def ping(self):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            self.before_ping()
        finally:
            self.now -= 1
            self.pings += 1

    def close(self):
        pass


class Lock:
    """A lock that notes each thread that asks for it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.arrived = []

    def __enter__(self):
        self.arrived.append(threading.current_thread())
        return self._lock.__enter__()

    def __exit__(self, *exc_info):
        return self._lock.__exit__(*exc_info)


class Store(LazyStore):
    """A lazy store that opens ``Backend`` objects."""

    __iter__ = None

    def __init__(self):
        super().__init__(scheduler=Mock(THREADS, wraps=THREADS, lock=Lock))
        self.opened = []

    def add(self, plant):
        return self._backend()

    def _open_backend(self):
        self.opened.append(Backend())
        return self.opened[-1]


@pytest.fixture
def store():
    """A store that is not opened yet."""
    return Store()


def test_concurrent_first_uses_open_it_once(store):
    """Several first callers open one backend, and all of them use it."""
    used = []

    def open_late():
        wait_until(lambda: len(store._process().opening.arrived) == 4)
        return Store._open_backend(store)

    store._open_backend = open_late
    in_threads(*[lambda: used.append(store.add(None))] * 4)
    assert used == store.opened * 4


def test_child_forked_while_another_thread_opens(store):
    """A lock that is held at a fork does not block the child."""
    thread = threading.Thread(target=store.add, args=[None])
    with store._process().opening:
        thread.start()
        in_child(lambda: store.add(None))
    thread.join(PATIENCE)


@pytest.mark.parametrize(
    'error', [None, StoreUnavailable('full'), KeyboardInterrupt()], ids=repr
)
def test_pings_are_shared(store, error):
    """One ping runs at a time; its failure, too, is that of all who called before."""
    backend = store.add(None)
    held = threading.Event()
    raised = []

    def end():
        held.wait(PATIENCE)
        if backend.pings and error:
            raise error

    def ask():
        try:
            store.ping()
        except BaseException as ex:
            raised.append(ex)

    def ask_later():
        wait_until(lambda: backend.now)
        ask()

    def release():
        wait_until(lambda: len(store._process().pinging.arrived) == 8)
        held.set()

    backend.before_ping = end
    in_threads(ask, *[ask_later] * 7, release)
    assert (backend.most, backend.pings) == (1, 2)
    assert len(raised) == (7 if error else 0)
    if error:
        assert raised[0] is error
        assert all(isinstance(other, StoreUnavailable) for other in raised[1:])
    backend.before_ping = lambda: None
    store.ping()
