"""The lock of a plant file: waits are limited, and it belongs to one file."""

import errno
import fcntl
import itertools
import os
import threading
import time
from contextlib import closing
from functools import partial

import pytest
from disk import assert_raise, assert_stored, fill, index_of, lines, open_paths
from machine import locked
from waiting import in_threads, wait_until

from store import Plant, StoreUnavailable
from store.jsonl import JSONLinesStore
from store.jsonl import lock as plant_lock
from store.jsonl.repair import verify

FERN, MOSS = Plant(1, 'Fern'), Plant(2, 'Moss')


def test_lock_held_by_another_process_or_thread(path, monkeypatch):
    """While another process or thread has the lock, every use fails in time."""
    monkeypatch.setattr(plant_lock, 'LOCK_WITHIN', 0.05)
    with JSONLinesStore(path) as store, JSONLinesStore(path) as not_open:
        store.add(FERN)
        with locked(path):
            uses = partial(store.add, MOSS), store.ping, not_open.ping
            reads = partial(list, store), partial(verify, path, repair=True)
            words = f'^{path}: .* holds the lock'
            assert_raise(StoreUnavailable, *uses, *reads, match=words)
        with store._backend()._lock.held():
            assert_raise(StoreUnavailable, uses[0], match='holds the lock')
        with pytest.raises(ZeroDivisionError), store._backend()._lock.held():
            raise ZeroDivisionError
        assert not_open.add(MOSS)  # an error releases it
        store.ping()
    assert path.read_bytes() == lines(FERN, MOSS)


def test_every_add_has_one_deadline(path, monkeypatch):
    """An add waits in all for as long as in the queue, and says what was in its way."""
    monkeypatch.setattr(plant_lock, 'LOCK_WITHIN', 0.5)
    monkeypatch.setattr('store.group_commit.WAIT_WITHIN', 1)
    waited = []

    def add(store, place):
        time.sleep(0.1 * place)  # so that they are in different batches
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match='holds the lock'):
            store.add(Plant(place, 'Fern'))
        waited.append(time.monotonic() - began)

    with JSONLinesStore(path) as opened, JSONLinesStore(path) as not_open:
        opened.add(FERN)
        adds = itertools.product([opened, not_open], range(12))
        with locked(path):
            in_threads(*(partial(add, *each) for each in adds))
        assert max(waited) < 5
        assert opened.add(MOSS)
        assert not_open.add(MOSS) is False


@pytest.mark.parametrize('held_for', [0.000_3, 0.002, 0.03, 1])
def test_free_lock_is_noticed_soon(path, monkeypatch, held_for):
    """A caller sleeps only for a share of its wait, or it would miss the lock often."""
    clock = [0.0]
    monkeypatch.setattr(plant_lock.time, 'monotonic', lambda: clock[0])
    path.touch()
    lock = plant_lock.FileLock(path, lambda: os.open(path, os.O_RDWR))
    with path.open('rb') as other, closing(lock):
        fcntl.flock(other, fcntl.LOCK_EX)

        def sleep(seconds):
            clock[0] += seconds
            if clock[0] >= held_for:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(plant_lock.time, 'sleep', sleep)
        with lock.held():
            assert clock[0] <= held_for + max(0.000_05, held_for / 8)


def test_unlock_that_fails_keeps_nobody_out(path, monkeypatch):
    """An unlock that fails keeps nobody else out, and the store goes on."""

    def flock(fd, operation):
        if operation == fcntl.LOCK_UN and faults:
            raise OSError(errno.EIO, faults.pop())
        real(fd, operation)

    real, faults = fcntl.flock, []
    with JSONLinesStore(path) as store, JSONLinesStore(path) as other:
        store.add(FERN)
        monkeypatch.setattr(fcntl, 'flock', flock)
        faults.append('once')
        store.add(MOSS)
        assert not faults
        assert other.add(FERN) is other.add(MOSS) is False
        faults.append('once')
        store.close()
        assert not faults
        other.ping()
    assert path.read_bytes() == lines(FERN, MOSS)


@pytest.mark.parametrize('who', ['opened', 'not yet', 'repair'])
def test_file_replaced_meanwhile_is_left_alone(path, who):
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
                table = index_of(path).stat().st_ino
                fcntl.flock(other, fcntl.LOCK_UN)
                wait_until(refused.is_set)
                assert index_of(path).stat().st_ino == table
                assert_stored(current, others, free=[100])

        refused = threading.Event()
        in_threads(lambda: use() or refused.set(), replace)
