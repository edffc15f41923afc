"""The file store: the contract, the bytes of a line, its files, its end."""

import contextlib
import errno
import fcntl
import itertools
import os
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from contract import StoreContract
from disk import (
    append,
    assert_raise,
    assert_stored,
    blocked_syncs,
    failing,
    failure,
    files,
    fill,
    index_of,
    open_paths,
    raw_plants,
)
from machine import locked
from waiting import PATIENCE, in_child, in_threads, wait_until

from store import (
    IdTaken,
    Plant,
    StoreClosed,
    StoreCorrupt,
    StoreUnavailable,
    lazy,
    open_store,
)
from store.jsonl import JSONLinesStore, index
from store.jsonl import disk as disk_calls
from store.jsonl import file as plant_file
from store.jsonl.repair import Verified, verify

FERN = b'{"id":1,"name":"Fern"}\n'
MOSS = b'{"id":2,"name":"Moss","tag":"shade"}\n'
PLANTS = [Plant(1, 'Fern'), Plant(2, 'Moss', 'shade')]


class TestJSONLinesStore(StoreContract):
    @pytest.fixture
    def store(self, path):
        with JSONLinesStore(path) as store:
            yield store

    def raw_plants(self, store):
        return raw_plants(store.path.read_bytes()) if store.path.exists() else []

    def url(self, store):
        return f'jsonl:{store.path}'

    @contextlib.contextmanager
    def unavailable(self, store):
        away = store.path.rename(store.path.with_name('away'))
        yield
        away.rename(store.path)


class TestFile:
    def test_relative_path_is_resolved_at_once(self, path, monkeypatch):
        monkeypatch.chdir(path.parent)
        store = open_store(f'jsonl:{path.name}')
        monkeypatch.chdir('/')
        with store:
            store.add(Plant(1, 'Fern'))
        assert path.read_bytes() == FERN

    @pytest.mark.parametrize('mode', [None, 0o640], ids=['new', 'there'])
    def test_files_have_mode_and_owner_of_the_plant_file(self, path, mode):
        """A new file is private; all files beside a file have its mode and owner."""
        mask = os.umask(0)
        try:
            if mode:
                path.touch()
                path.chmod(mode)
                if not os.geteuid():
                    os.chown(path, 12, 34)
            with JSONLinesStore(path) as store:
                store.add(PLANTS[0])
                append(path, b'torn')
                store.ping()
                found = {name: path.with_name(name).stat() for name in files(path)}
        finally:
            os.umask(mask)
        names = {name.removeprefix(path.name) for name in found}
        index = {f'.index{suffix}' for suffix in ('', '-shm', '-lock', '-wal')}
        assert names == {'', '.torn-1', *index}
        owners = {(status.st_uid, status.st_gid) for status in found.values()}
        ours = os.geteuid(), os.getegid()
        assert owners == {(12, 34) if mode and not os.geteuid() else ours}
        modes = {status.st_mode & 0o7777 for status in found.values()}
        assert modes == {mode or 0o600}

    def test_file_that_cannot_be_made(self, path):
        """A file that cannot be opened or made is unavailable; nothing is made."""
        path.mkdir()
        reasons = 'it is a directory, not a file', 'directory does not exist'
        for wrong, reason in zip((path, path / 'no' / 'x'), reasons, strict=True):
            with JSONLinesStore(wrong) as store:
                for use in store.ping, store.check_opening:
                    with pytest.raises(StoreUnavailable, match=reason) as caught:
                        use()
                    assert str(wrong) in str(caught.value)
                    assert str(path) not in caught.value.reason
        assert list(path.iterdir()) == []

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    def test_missing_right_is_told(self):
        """What may not be opened or made is refused with its mode and its owner."""

        def use():
            if not os.getuid():
                os.seteuid(65534)
            ours = f'belongs to user {os.getuid()}; this process is of user '
            for path, what in (there, f'{there} has mode 0'), (missing, f'{at} has m'):
                store = JSONLinesStore(path)
                with pytest.raises(StoreUnavailable, match='cannot be written to'):
                    store.check_opening()
                with pytest.raises(StoreUnavailable, match='Permission den') as caught:
                    store.ping()
                assert what in caught.value.detail
                assert f'{ours}{os.geteuid()}' in caught.value.detail
            with JSONLinesStore(shared) as store:
                assert store.add(PLANTS[0])
            assert verify(read_only) == Verified(1)
            with pytest.raises(StoreUnavailable, match='Permission denied'):
                verify(read_only, repair=True)

        with tempfile.TemporaryDirectory() as name:
            at = Path(name).resolve()
            there, missing = at / 'there', at / 'missing'
            there.touch(0)
            (read_only := at / 'read only').write_bytes(FERN)
            read_only.chmod(0o444)
            (shared := at / 'shared' / 'plants').parent.mkdir()
            shared.touch()
            for free in shared.parent, shared:
                free.chmod(0o777)
            at.chmod(0o555)
            in_child(use)
            at.chmod(0o755)

    def test_observer_learns_of_each_sync(self, path, monkeypatch):
        """It is called for each sync; a repeat of a synced plant needs none."""
        seen = []
        monkeypatch.setattr(index, 'LOOK_WITHIN', 0)
        with JSONLinesStore(path) as store:
            store.on_sync = lambda *sync: seen.append((sync[0], sync[1] > 0))
            store.add(Plant(1, 'Fern'))
            store.add(Plant(1, 'Fern'))
            with pytest.raises(IdTaken):
                store.add(Plant(1, 'Moss'))
            with JSONLinesStore(path) as other:  # another process, which flushes
                other.add(Plant(3, 'Ivy'))
            assert store.add(Plant(3, 'Ivy')) is False
            assert seen == [(1, True)]
            store.on_sync = lambda *sync: 1 / 0  # as it must not
            assert store.add(Plant(2, 'Moss'))


class TestMissingFile:
    def test_missing_file_is_not_made_again(self, path):
        """A missing file with an index is made again only with ``create='always'``."""
        fill(path, PLANTS[0])
        path.unlink()
        with JSONLinesStore(path) as store:
            uses = store.ping, lambda: store.add(Plant(1, 'Moss'))
            assert_raise(StoreUnavailable, *uses, match=r'remove .*\.index')
            assert not path.exists()
            path.write_bytes(FERN)
            with pytest.raises(IdTaken):
                store.add(Plant(1, 'Moss'))
        path.unlink()
        with open_store(f'jsonl:{path}', create='always') as store:
            store.add(Plant(1, 'Moss'))
            assert list(store) == [Plant(1, 'Moss')]
        for file in path.parent.iterdir():
            file.unlink()
        with open_store(f'jsonl:{path}', create='always') as store:
            path.unlink()
            assert_raise(StoreUnavailable, store.ping, match='the file is gone')
            assert not path.exists()

    def test_old_index_is_removed_before_a_file_is_made(self, path, disk, monkeypatch):
        """Its table goes last: SQLite would give a WAL to the next table."""
        done, unlink = [], Path.unlink

        def record(path, **options):
            done.append(path.name)
            unlink(path, **options)

        def before(name, target, *arguments):
            if name == 'fsync' or target == path:
                done.append(name)

        disk.before = before
        for suffix in '', '-journal', '-shm', '-wal', '.notes':
            index_of(path, suffix).touch()
        monkeypatch.setattr(Path, 'unlink', record)
        JSONLinesStore(path, create='always').close()
        assert done[0] == 'open'  # there is no file
        assert done[4:7] == [index_of(path).name, 'fsync', 'open']
        assert index_of(path, '.notes').exists()  # it is somebody else's

    def test_file_that_two_processes_make(self, path, disk):
        """A file that another process makes, just before this one does, is kept."""

        def make(name, *arguments):
            if name == 'fsync':
                disk.resume()
                fill(path, PLANTS[0])

        disk.before = make
        with JSONLinesStore(path) as store:
            store.add(PLANTS[1])
        assert path.read_bytes() == FERN + MOSS


# Errors of F_FULLFSYNC: none, of file systems that lack it, of a disk.
FULL_SYNCS = 0, errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.EIO


class TestThreads:
    def test_plants_of_a_batch_share_a_write_and_a_sync(self, path, disk):
        with JSONLinesStore(path) as store:
            store.ping()
            disk.calls.clear()
            store.add_many(PLANTS)
            assert disk.calls_on(path) == ['pwrite', 'fdatasync']
            assert store._record(PLANTS[0])[1] == len(FERN)  # batches are limited by it
        assert path.read_bytes() == FERN + MOSS

    @pytest.mark.parametrize('error', FULL_SYNCS)
    def test_sync_on_macos_reaches_the_platter(self, path, disk, monkeypatch, error):
        """A sync on macOS is F_FULLFSYNC, or fsync if the file system has none."""

        def full_sync(fd, command):
            disk.calls.append(('F_FULLFSYNC', fd))
            if error:
                raise failure(error)

        mac = vars(fcntl) | {'F_FULLFSYNC': 51, 'fcntl': full_sync}
        with JSONLinesStore(path) as store:
            store.ping()
            disk.calls.clear()
            monkeypatch.setattr(disk_calls, 'fcntl', SimpleNamespace(**mac))
            if error == errno.EIO:
                adds = (partial(store.add, plant) for plant in PLANTS)
                assert_raise(StoreUnavailable, *adds, match='a sync failed')
                assert disk.calls_on(path) == ['pwrite', 'F_FULLFSYNC']
            else:
                store.add(PLANTS[0])
                syncs = ['F_FULLFSYNC', *(['fsync'] if error else [])]
                assert disk.calls_on(path) == ['pwrite', *syncs]

    def test_close_leaves_no_descriptor(self, path):
        """A closed store holds no descriptor, whether its open succeeded or not."""
        fill(path, PLANTS[0])
        with mock.patch.object(index.Index, '_read_tail', failing(errno.EIO)):
            assert_raise(StoreUnavailable, partial(fill, path))
        path.write_bytes(FERN + b'?\n' + MOSS)
        assert_raise(StoreCorrupt, partial(fill, path))
        path.unlink()
        assert_raise(StoreUnavailable, partial(fill, path))
        # Only its own: a store of an earlier test may end meanwhile.
        assert not [it for it in open_paths() if it.startswith(str(path.parent))]


def test_close_while_another_process_keeps_the_lock(path, monkeypatch):
    """A close waits only for a limited time for a process that keeps the lock."""
    assert plant_file.CLOSE_WITHIN < lazy.CLOSE_WITHIN <= 5
    assert lazy.OPENING_WITHIN < lazy.CLOSE_WITHIN
    monkeypatch.setattr(plant_file, 'CLOSE_WITHIN', 0.05)
    for name in 'jsonl.lock.LOCK', 'lazy.CLOSE':
        monkeypatch.setattr(f'store.{name}_WITHIN', 10 * PATIENCE)
    store = JSONLinesStore(path)
    store.add(Plant(1, 'Fern'))
    backend = store._backend()
    with locked(path):
        in_threads(store.close)
        with pytest.raises(StoreClosed), backend._lock.held(0.1):
            pytest.fail('the lock was taken')
    # A thread, because it would wait for ever for a descriptor of a closed store.
    in_threads(lambda: assert_raise(StoreClosed, lambda: backend._sync(0)))
    assert_stored(path, PLANTS[:1])


# An error in __del__ is reported, and goes no further.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('failing', range(9))
def test_close_that_fails_releases_everything(path, monkeypatch, failing):
    """A descriptor that does not close leaves no other open, and no lock."""

    def close(fd):
        real(fd)
        if closing and next(closes) == failing:
            raise failure(errno.EIO)

    real, closes = os.close, itertools.count()
    closing = []
    monkeypatch.setattr(os, 'close', close)  # first: the store keeps it for its end
    store = JSONLinesStore(path)
    store.add(PLANTS[0])
    closing.append(True)
    with contextlib.suppress(StoreUnavailable):
        store.close()
    monkeypatch.undo()
    store.close()
    wait_until(lambda: not any(str(path) in each for each in open_paths()))
    assert_stored(path, PLANTS[:1])


@pytest.mark.parametrize('stuck', [False, True], ids=['slow', 'stuck'])
def test_close_waits_for_a_sync(path, disk, monkeypatch, stuck):
    """A close waits for a sync in flight, but only for a limited time."""
    monkeypatch.setattr(lazy, 'CLOSE_WITHIN', 0.05 if stuck else PATIENCE)
    closed = threading.Event()

    def close():
        gate.wait_for()
        store.close()
        closed.set()

    def release():
        gate.wait_for()
        # A close that did not wait would end long before the short timeout.
        assert closed.wait(PATIENCE if stuck else 0.2) == stuck
        gate.open()

    store = JSONLinesStore(path)
    with blocked_syncs(disk) as gate:
        in_threads(lambda: store.add(PLANTS[0]), close, release)
    assert path.read_bytes() == FERN
