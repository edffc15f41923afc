"""A lazy store opens at its first use, once per process, and shares pings."""

import sys
import threading
from unittest.mock import Mock

import pytest
from disk import Gate, assert_raise
from store.lazy import Backend, LazyStore
from waiting import PATIENCE, in_child, in_threads, wait_until

from store import THREADS, Plant, StoreClosed, StoreUnavailable, lazy

FERN = Plant(1, 'Fern')


class Store(LazyStore):
    """A lazy store whose backends add plants to a list."""

    __iter__ = None

    def __init__(self):
        super().__init__('test')
        self.opened = []
        self.added = []
        self.before_open = lambda: None

    def _record(self, plant):
        return plant, 1

    def _open_backend(self):
        self.before_open()
        self.opened.append(Mock(Backend, append=self._append))
        return self.opened[-1]

    def _append(self, batch):
        self.added += [entry.item for entry in batch]


@pytest.fixture
def store():
    """A store that is not opened yet."""
    with Store() as store:
        yield store


def test_concurrent_first_uses_open_it_once(store, monkeypatch):
    """Several first callers open one backend, and all of them use it."""
    together, process = threading.Barrier(6, timeout=PATIENCE), lazy._Process

    def at_once(store):
        together.wait()
        return process(store)

    monkeypatch.setattr(lazy, '_Process', at_once)
    store.before_open = gate = Gate()
    adds = [lambda: store.add(FERN)] * 4
    others = store.ping, lambda: store.add_many([FERN])
    in_threads(*adds, *others, lambda: gate.wait_for() or gate.open())
    [backend] = store.opened
    assert (store.added, backend.ping.call_count) == ([FERN] * 5, 1)


def test_child_forked_while_another_thread_opens(store):
    """An opening that goes on at a fork does not block the child."""
    store.before_open = gate = Gate()
    thread = threading.Thread(target=store.add, args=[FERN])
    thread.start()
    gate.wait_for()
    in_child(lambda: gate.open() or store.add(FERN))
    gate.open()
    thread.join(PATIENCE)


@pytest.mark.parametrize(
    'error', [None, StoreUnavailable('full'), KeyboardInterrupt()], ids=repr
)
def test_pings_are_shared(store, error):
    """One ping runs at a time; its failure, too, is that of all who called before."""
    store.add(FERN)
    [backend] = store.opened
    gate, raised = Gate(), []

    def ping():
        gate()
        if backend.ping.call_count == 2 and error:
            raise error

    def ask():
        try:
            store.ping()
        except StoreUnavailable as ex:
            raised.append(ex)

    def release():
        wait_until(lambda: len(store._process().pings._waiting) == 7)
        assert len(gate.held) == 1
        gate.open()

    backend.ping.side_effect = ping
    in_threads(ask, *[lambda: gate.wait_for() or ask()] * 7, release)
    assert backend.ping.call_count == 2
    assert len(raised) == (7 if error else 0)
    if isinstance(error, StoreUnavailable):
        assert raised == [error] * 7
    store.ping()


def test_batch_after_a_close_opens_nothing(store):
    """A thread that has taken a batch before a close finds the store closed."""
    process = store._process()
    store.close()
    assert_raise(StoreClosed, process.open)
    assert store.opened == []


def test_close_waits_for_no_opening_that_hangs(store, monkeypatch):
    """A close waits for no opening that hangs; what it opens is closed then."""
    monkeypatch.setattr('store.lazy.OPENING_WITHIN', 0.05)
    store.before_open = gate = Gate()

    def add():
        with pytest.raises(StoreClosed):
            store.add(FERN)

    def close():
        gate.wait_for()
        store.close()
        assert not store.opened
        gate.open()

    in_threads(add, close)
    wait_until(lambda: store.opened and store.opened[0].close.called)
    store.close()
    assert (store.opened[0].close.call_count, store.added) == (1, [])


def test_caller_that_waits_too_long_hears_for_what(store, monkeypatch):
    """It leaves in time, with the reason: the opening, or the open store."""
    monkeypatch.setattr('store.group_commit.WAIT_WITHIN', 0.05)
    store.before_open = gate = Gate()
    assert_raise(StoreUnavailable, store.ping, match='^test: .* is being opened')
    gate.open()
    wait_until(lambda: store.opened and store.opened[0].ping.called)
    store.opened[0].ping.side_effect = gate = Gate()
    assert_raise(StoreUnavailable, store.ping, match='did not answer in time')
    gate.open()


def test_bulk_of_no_plants_opens_the_store(store):
    """A command opens a store by it, however long that takes; Ctrl-C is told."""
    store.before_open = Mock(side_effect=KeyboardInterrupt)
    assert_raise(KeyboardInterrupt, lambda: store.add_many([]))
    store.before_open = lambda: None
    store.add_many([])
    assert len(store.opened) == 1


def test_without_threads_it_refuses_and_closes(store, monkeypatch):
    """Where no thread can be started an add is refused; a close needs none."""
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(THREADS, 'start', refuse)
    uses = store.ping, lambda: store.add(FERN)
    assert_raise(StoreUnavailable, *uses, match='^no thread can be started: can')
    store.add_many([FERN])
    store.close()
    store.opened[0].close.assert_called_once()
    monkeypatch.undo()
    fresh, threads = Store(), len(sys._current_frames())
    fresh.close()
    assert_raise(StoreClosed, fresh.ping, lambda: fresh.add(FERN))
    assert len(sys._current_frames()) <= threads
    assert not fresh.opened
