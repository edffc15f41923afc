"""The file store on a disk that fails, is full, or loses unsynced writes."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
from disk import Fault, Gate, append, assert_raise, failing, files, fill, full, lines
from waiting import PATIENCE

from store import Plant, StoreCorrupt, StoreUnavailable
from store.jsonl import JSONLinesStore
from store.jsonl.disk import file_system
from store.jsonl.record import NEAR

FERN, MOSS, IVY = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Ivy')
TORN = b'{"id":7,"na'


@pytest.fixture
def store(path, disk):
    """Return an open store with one plant."""
    with JSONLinesStore(path) as store:
        store.add(FERN)
        yield store


def test_ping_tells_what_an_add_would(path, disk, store):
    """It writes elsewhere; after a failed write at that place and length, too."""
    begun = disk.now
    store.ping()
    assert disk.calls_since(begun) == []
    room = len(lines(FERN)) + 10

    def effect(fd, data, offset):
        if offset + len(data) > room:
            failing(errno.EFBIG)()

    disk.before = Fault('pwrite', 1, effect, lasting=True)
    store.ping()  # there is room for a small plant
    assert_raise(StoreUnavailable, *2 * [partial(store.add, IVY)])
    assert_raise(StoreUnavailable, store.ping, match='large')
    assert store.add(FERN) is False
    disk.resume()
    begun = disk.now
    store.ping()  # which tries the plant file, too: it may be immutable, for example
    assert disk.calls_since(begun) == ['pwrite']
    assert store.add_many([MOSS, IVY]) == [True, True]  # one write and sync a batch
    assert disk.calls_since(begun)[1:] == ['pwrite', 'fdatasync']
    room = 20
    disk.before = Fault('pwrite', 1, effect, lasting=True)
    store.ping()  # as before the failure


@pytest.mark.parametrize('call', ['fsync', 'pwrite', 'ftruncate'])
def test_torn_tail_on_a_full_disk(path, disk, store, caplog, call):
    """It stays, and without a copy; a copy is told though the next write fails."""
    disk.fchown = failing(errno.EINVAL)  # as in a container that lacks the owner
    append(path, TORN)
    disk.before = Fault(call, 1, failing(errno.ENOSPC), lasting=True)
    assert_raise(StoreUnavailable, *[partial(store.add, MOSS)] * 3)
    assert files(path) == {path.name: lines(FERN) + TORN}
    disk.before = Fault('pwrite', 2, failing(errno.ENOSPC))  # the first copies
    assert_raise(StoreUnavailable, partial(store.add, MOSS))
    assert 'moved to plants.jsonl.torn-1' in caplog.text


def test_cut_that_fails_after_it_was_made(path, disk, store):
    """As where a disk fails while its blocks are freed: the copy stays."""
    append(path, TORN)
    fail = failing(errno.EIO)
    disk.before = Fault('ftruncate', 1, lambda *call: (os.ftruncate(*call), fail()))
    assert_raise(StoreUnavailable, partial(store.add, MOSS))
    assert files(path)['plants.jsonl.torn-1'] == TORN
    assert store.add(MOSS)


@pytest.mark.parametrize(
    ('is_full', 'end'), [(False, b''), (True, b''), (False, TORN)], ids=str
)
def test_store_refuses_after_a_failed_sync(path, disk, store, is_full, end):
    """Wherever: the kernel reports it once to each process, and drops the pages."""
    other = JSONLinesStore(path)
    other.ping()
    append(path, end)
    effects = {'fdatasync': failing(errno.EIO), 'pwrite' * is_full: full(5)}
    disk.before = lambda name, *_: effects[name]() if name in effects else None
    assert_raise(StoreUnavailable, partial(store.add, MOSS))
    disk.resume()
    with other:
        assert_raise(StoreUnavailable, partial(other.add, MOSS))
        adds = [partial(it.add, new) for it in (store, other) for new in (MOSS, IVY)]
        refused = *adds, store.ping, partial(store.add, FERN)
        assert_raise(StoreUnavailable, *refused, match='reload.*output error')
    assert disk.durable == lines(FERN)
    # As reloads do, of which the first fail, too. A sync alone would lose the line: the
    # kernel takes its page for clean.
    disk.before = Fault('fdatasync', 1, failing(errno.EIO), lasting=True)
    assert_raise(StoreUnavailable, *3 * [lambda: JSONLinesStore(path).load()])
    disk.resume()
    append(path, end)  # its mend syncs too early
    fill(path, MOSS)
    assert disk.durable == path.read_bytes() == lines(FERN, MOSS)


@pytest.mark.parametrize('shared', [True, False], ids=['same-store', 'another'])
@pytest.mark.parametrize('plant', [MOSS, MOSS._replace(name='Fern')], ids=repr)
def test_answer_rests_on_a_durable_line(path, disk, shared, plant):
    """A repeat or a refusal waits until the line that it rests on is durable."""
    store = JSONLinesStore(path)
    with store, store if shared else JSONLinesStore(path) as other:
        store.add(FERN)
        other.add(FERN)
        gate = Gate()
        disk.before = lambda name, *arguments: gate() if name == 'fdatasync' else None
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(store.add, MOSS)
            gate.wait_for(1)
            answer = pool.submit(other.add, plant)
            if not shared:
                gate.wait_for(2)
            with pytest.raises(TimeoutError):
                answer.result(0.05)
            assert disk.durable == lines(FERN)
            gate.set()
            assert (answer.exception(PATIENCE) is None) is (plant == MOSS)
            assert first.result(PATIENCE)
            begun = disk.now
            assert other.add(FERN) is False  # it was durable before
            assert disk.calls_since(begun) == []
    assert path.read_bytes() == disk.durable == lines(FERN, MOSS)


@pytest.mark.parametrize('call', ['flock', 'fdatasync'])
def test_file_system_without_locks_or_syncs(path, disk, monkeypatch, call):
    """It is refused in words that name it, as is what to do."""
    mounts = path.with_name('mounts')  # a mount point may have any name
    points = rb'/my\040disk rw - nfs9', b'/\xff rw - tmpfs', b'/ rw - ext9'
    mounts.write_bytes(b''.join(b'2 1 0:2 / %b x rw\n' % point for point in points))
    monkeypatch.setattr('builtins.open', lambda _, **how: mounts.open(**how))
    monkeypatch.setattr(fcntl if call == 'flock' else disk, call, failing(errno.ENOLCK))
    load = JSONLinesStore(path).load
    assert_raise(StoreUnavailable, load, load, match=r'\(ext9\).*local')
    assert file_system(path / '/my disk/it') == 'nfs9'


@pytest.mark.parametrize('error', [0, errno.ENOTSUP, errno.EINVAL, errno.EIO])
def test_sync_on_macos_reaches_the_platter(path, disk, store, monkeypatch, error):
    """A sync on macOS is F_FULLFSYNC, or fsync if the file system has none."""

    def full_sync(fd, command):
        disk.calls.append(f'F_FULLFSYNC {path.name}')
        error and failing(error)()

    monkeypatch.setattr(fcntl, 'F_FULLFSYNC', 51, raising=False)
    monkeypatch.setattr(fcntl, 'fcntl', full_sync)
    begun, syncs = disk.now, ['fsync'] * (error not in (0, errno.EIO))
    with pytest.raises(StoreUnavailable) if error == errno.EIO else nullcontext():
        store.add(MOSS)
    assert disk.calls_since(begun) == ['pwrite', 'F_FULLFSYNC', *syncs]


def test_plant_that_could_not_be_compared_is_not_known(path, disk, store):
    """Of another process, with a taken id: the next add reads it again, and sees it."""
    append(path, lines(Plant(FERN.id, 'Rival'), MOSS))
    disk.before = lambda name, *call: call[1:2] == (NEAR,) and failing(errno.EIO)()
    assert_raise(StoreUnavailable, partial(store.add, IVY))
    disk.resume()
    assert_raise(StoreCorrupt, *2 * [partial(store.add, IVY)])
    path.write_bytes(lines(FERN))
    assert store.add(MOSS)


def test_sync_that_was_interrupted_does_not_count(disk, store):
    """Nobody knows what it did: a repeat of its plant is synced before it is 200."""
    disk.before = Fault('fdatasync', 1, Mock(side_effect=MemoryError))
    assert_raise(StoreUnavailable, partial(store.add, MOSS))
    begun = disk.now
    assert store.add(MOSS) is False
    assert disk.calls_since(begun) == ['fdatasync']
