"""The lock of a plant file: waits are limited, and it belongs to one file."""

import fcntl
import os
import threading
from contextlib import closing
from unittest.mock import Mock

import pytest
from disk import assert_stored, fill, lines, open_paths

from store import Plant, StoreClosed, StoreUnavailable
from store.jsonl import JSONLinesStore
from store.jsonl import lock as plant_lock
from store.jsonl.repair import verify
from store.scheduler import THREADS
from store.testing.waiting import in_threads, wait_until

FERN, MOSS = Plant(1, 'Fern'), Plant(2, 'Moss')


def test_lock_held_by_another_process_or_thread(path, monkeypatch):
    """While somebody else holds the lock every use fails in time; then it works."""
    monkeypatch.setattr(plant_lock, 'LOCK_WITHIN', 0.05)
    scheduler = Mock(THREADS, wraps=THREADS)
    with (
        JSONLinesStore(path, scheduler=scheduler) as store,
        JSONLinesStore(path) as not_open,
    ):
        store.add(FERN)
        with path.open('rb') as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            scheduler.call.reset_mock()
            for attempt in (
                lambda: store.add(MOSS),
                store.ping,
                not_open.ping,
                lambda: list(store),
                lambda: verify(path, repair=True),
            ):
                with pytest.raises(StoreUnavailable, match='holds the lock'):
                    attempt()
            # A server's own thread must not block: all waits are in calls.
            assert scheduler.call.call_count > 3
        refused = pytest.raises(StoreUnavailable, match='holds the lock')
        with store._backend()._lock.held(), refused:
            store.add(MOSS)
        store.ping()
        assert not_open.add(MOSS)
    assert path.read_bytes() == lines(FERN, MOSS)


@pytest.mark.parametrize('held_for', [0.000_3, 0.002, 0.03, 1])
def test_free_lock_is_noticed_soon(path, monkeypatch, held_for):
    """A caller that has waited for a while does not sleep for as long again.

    Where others append all the time it would find the lock taken again and again.
    """
    clock = [0.0]
    monkeypatch.setattr(plant_lock.time, 'monotonic', lambda: clock[0])
    path.touch()
    lock = plant_lock.FileLock(path, os.open(path, os.O_RDWR))
    with path.open('rb') as other, closing(lock):
        fcntl.flock(other, fcntl.LOCK_EX)

        def sleep(seconds):
            clock[0] += seconds
            if clock[0] >= held_for:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(plant_lock.time, 'sleep', sleep)
        with lock.held():
            assert clock[0] <= held_for + max(0.000_05, held_for / 8)


def test_lock_of_a_closed_file_raises(path):
    """After a close, taking the lock raises ``StoreClosed``."""
    store = JSONLinesStore(path)
    store.add(FERN)
    lock = store._backend()._lock
    store.close()
    with pytest.raises(StoreClosed), lock.held():
        pytest.fail('the lock was taken')


def test_interrupted_wait_leaves_no_lock(path):
    """A caller that is interrupted while it waits leaves nothing locked."""
    scheduler = Mock(THREADS, wraps=THREADS)
    with JSONLinesStore(path, scheduler=scheduler) as store:
        store.add(FERN)
        with path.open('rb') as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            scheduler.call.side_effect = KeyboardInterrupt
            with pytest.raises(KeyboardInterrupt):
                store.add(MOSS)
            scheduler.call.side_effect = None
        assert store.add(MOSS)


@pytest.mark.parametrize('who', ['opened', 'not yet', 'repair'])
def test_file_replaced_while_waiting(path, who):
    """Whoever waited for the lock of a replaced file leaves the new one alone."""
    fill(path, FERN)
    others = [Plant(id, 'Moss') for id in range(9)]
    with JSONLinesStore(path) as waiting, path.open('rb') as other:
        if who == 'opened':
            waiting.ping()
        fcntl.flock(other, fcntl.LOCK_EX)

        def use():
            with pytest.raises(StoreUnavailable, match=r'was replaced (by|m)'):
                verify(path, repair=True) if who == 'repair' else waiting.add(MOSS)

        def replace():
            wait_until(lambda: open_paths().count(str(path)) > 1)
            path.with_name('new').write_bytes(lines(*others))
            path.with_name('new').replace(path)
            with JSONLinesStore(path) as current:
                current.ping()
                fcntl.flock(other, fcntl.LOCK_UN)
                wait_until(refused.is_set)
                assert_stored(current, others, free=[100])

        refused = threading.Event()
        in_threads(lambda: use() or refused.set(), replace)
