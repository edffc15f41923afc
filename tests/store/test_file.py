"""The plant file itself: how it is made, and what happens to it under a store."""

import errno
import fcntl
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from disk import (
    append,
    assert_raise,
    assert_stored,
    failing,
    files,
    fill,
    lines,
    open_paths,
)
from machine import locked
from server import REPOSITORY, finished
from waiting import in_child, in_threads, wait_until

from store import Plant, StoreCorrupt, StoreUnavailable, open_store
from store.jsonl import JSONLinesStore
from store.jsonl import lock as plant_lock
from store.jsonl.repair import Verified, verify

FERN, MOSS, IVY = PLANTS = [
    Plant(1, 'Fern'),
    Plant(2, 'Moss', 'shade'),
    Plant(3, 'Ivy'),
]


class TestMaking:
    def test_relative_path_is_resolved_at_once(self, path, monkeypatch):
        """Links to the file are followed, and all processes lock one file."""
        monkeypatch.chdir(path.parent)
        path.with_name('link').symlink_to(path.name)
        store = open_store('jsonl:link')
        monkeypatch.chdir('/')
        with store, JSONLinesStore(path) as other, locked(path):
            pass
        with JSONLinesStore(path) as other:
            assert other.add(FERN)
            with JSONLinesStore(path.with_name('link')) as store:
                assert store.add(FERN) is False
                assert store.path == other.path
        assert path.read_bytes() == lines(FERN)

    @pytest.mark.parametrize('mode', [None, 0o640], ids=['new', 'there'])
    def test_files_have_mode_and_owner_of_the_plant_file(self, path, mode):
        """A new file is private; a side file has the mode and owner of its file."""
        mask = os.umask(0)
        try:
            if mode:
                path.touch()
                path.chmod(mode)
                if not os.geteuid():
                    os.chown(path, 12, 34)
            with JSONLinesStore(path) as store:
                store.add(FERN)
                append(path, b'{"id":')
                store.ping()
        finally:
            os.umask(mask)
        assert {*files(path)} == {path.name, f'{path.name}.torn-1'}
        found = [path.with_name(name).stat() for name in files(path)]
        ours = os.geteuid(), os.getegid()
        owner = (12, 34) if mode and not os.geteuid() else ours
        assert {(status.st_uid, status.st_gid) for status in found} == {owner}
        assert {status.st_mode & 0o7777 for status in found} == {mode or 0o600}

    def test_missing_file_is_made_only_by_a_start(self, path):
        """And there at once, by one of two processes."""
        assert_raise(StoreUnavailable, JSONLinesStore(path, create=False).ping)
        assert not path.exists()
        store, other = JSONLinesStore(path), JSONLinesStore(path)
        assert path.read_bytes() == b''
        with store, other:
            assert store.add(FERN)
            assert other.add(FERN) is False
            path.unlink()
            assert_raise(StoreUnavailable, store.ping, other.ping, match='is not there')
        assert not path.exists()

    def test_what_is_no_file_is_refused(self, path):
        """A directory, a FIFO, a device, a loop of links: at once, and untouched."""
        path.mkdir()
        os.mkfifo(path / 'fifo')
        (path / 'loop').symlink_to('loop')
        (path / 'file').touch()
        names = '.', 'fifo', 'loop', '/dev/null', 'no/file', 'file/file'
        before = sorted(path.iterdir())
        for name in names:
            with pytest.raises(StoreUnavailable) as caught:
                JSONLinesStore(path / name)
            assert (
                str((path / name).parent) not in caught.value.reason
            )  # clients see it
            store = JSONLinesStore(path / name, create=False)
            verified = partial(verify, store.path)
            assert_raise(StoreUnavailable, store.ping, partial(list, store), verified)
        assert sorted(path.iterdir()) == before

    def test_link_in_the_place_of_a_side_file(self, path):
        """It is left, and not written through: a neighbour may have put it there."""
        path.write_bytes(lines(FERN) + b'{"id":')
        target = path.with_name('of somebody else')
        path.with_name('plants.jsonl.torn-1').symlink_to(target)
        fill(path, MOSS)
        assert path.with_name('plants.jsonl.torn-2').read_bytes() == b'{"id":'
        assert not target.exists()

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    def test_missing_right_is_told(self):
        """Of the file and of its directory: who owns it, and which user we are."""

        def use():
            if not os.getuid():
                os.seteuid(65534)
            for path, place in (secret, secret), (fixed, fixed.parent):
                with pytest.raises(StoreUnavailable) as caught:
                    JSONLinesStore(path, create=False).ping()
                assert f'{place} has mode ' in caught.value.detail
                assert f'user {os.geteuid()}' in caught.value.detail
            assert_raise(StoreUnavailable, lambda: JSONLinesStore(fixed.parent / 'new'))
            assert JSONLinesStore(free / 'new').add(FERN)
            assert verify(fixed) == Verified(1)  # which needs no right to write
            assert_raise(StoreUnavailable, partial(verify, secret, repair=True))

        with tempfile.TemporaryDirectory() as name:
            at, free = Path(name).resolve(), Path(name, 'free').resolve()
            free.mkdir()
            fixed, secret = at / 'fixed', free / 'secret'
            for path, mode in (fixed, 0o666), (secret, 0):
                path.write_bytes(lines(FERN))
                path.chmod(mode)
            free.chmod(0o777)
            at.chmod(0o555)
            in_child(use)
            at.chmod(0o755)


def everything(directory):
    """Return what is in a directory, with the content of files."""
    return {it: it.is_file() and it.read_bytes() for it in directory.rglob('*')}


def copy(path, away):
    """Another file with the same content is there."""
    shutil.copy2(away, path)


def shortened(path, away):
    """The last line is missing, in place."""
    away.rename(path)
    os.truncate(path, len(lines(*PLANTS[:2])))


def edited(path, away):
    """The last line is another one, in place."""
    away.rename(path)
    text = path.read_bytes()
    path.write_bytes(text.replace(b'Ivy', b'Yew'))


CHANGES = {
    'gone': lambda path, away: None,
    'copy': copy,
    'directory': lambda path, away: path.mkdir(),
    'link': lambda path, away: path.symlink_to('nothing'),
    'shortened': shortened,
    'edited': edited,
}


class TestChanges:
    """A file that changes under a running store; all of it is noticed by each use."""

    @pytest.mark.parametrize('change', CHANGES.values(), ids=CHANGES)
    def test_changed_file_is_refused_until_it_is_back(self, path, change):
        """Adds say so, nothing is made anew, and the store goes on by itself."""
        with JSONLinesStore(path) as store:
            store.add_many(PLANTS)
            whole = path.read_bytes()
            away = path.rename(path.with_name('away'))
            change(path, away)
            before = everything(path.parent)
            for plant in FERN, Plant(4, 'Oak'), FERN._replace(name='Reed'):
                add = partial(store.add, plant)
                assert_raise(StoreUnavailable, add, store.ping, match='the file ')
            assert everything(path.parent) == before
            if away.exists():
                if path.is_dir():
                    path.rmdir()
                away.rename(path)
            else:
                with path.open('r+b') as file:
                    file.write(whole)
            store.ping()
            assert_stored(store, PLANTS, free=[100])

    def test_lines_changed_in_place_give_no_id_twice(self, path):
        """Also if the end is as it was: the line that an id leads to is read."""
        many = [Plant(id, 'Fern' * 9) for id in range(10, 99)]
        with JSONLinesStore(path) as store:
            store.add_many([*PLANTS, *many])
            text = path.read_bytes()
            path.write_bytes(text.replace(b'{"id":1,', b'{"id":7,'))
            adds = partial(store.add, FERN), partial(store.add, FERN._replace(name='x'))
            assert_raise(StoreUnavailable, *adds, match='reload')
            assert store.add(Plant(4, 'Oak')) is True  # which needs no other line

    @pytest.mark.skipif(sys.platform != 'linux' or os.geteuid() != 0, reason='a mount')
    def test_file_that_only_a_mount_keeps(self, path):
        """A file without a name is gone: nobody can open again what is written to it.

        As in a container with a mount of one file, which an editor on its host renames.
        """
        program = f"""
            import os
            from store import Plant, StoreUnavailable, open_store
            store = open_store('jsonl:{path}', create=True)
            store.add(Plant(1, 'Fern'))
            os.unlink('{path}-on-the-host')
            again = open_store('jsonl:{path}', create=False)
            for use in store.ping, lambda: store.add(Plant(2, 'Moss')), again.ping:
                try:
                    print(use() or 'accepted')
                except StoreUnavailable as ex:
                    print('gone' if 'not there' in ex.reason else ex)
        """
        program = '\n'.join(line[12:] for line in program.split('\n'))
        path.touch()
        path.with_name(f'{path.name}-on-the-host').touch()
        mount = f'mount --bind "{path}-on-the-host" "{path}"; exec "$@"'
        shell = ['unshare', '--mount', 'sh', '-c', mount, 'sh']
        done = finished([*shell, sys.executable, '-c', program], cwd=REPOSITORY)
        if 'mount' in done.stderr:
            pytest.skip('it needs the right to mount')
        assert done.stdout.split() == ['gone'] * 3, done.stderr

    @pytest.mark.parametrize('who', ['opened', 'not yet', 'repair'])
    def test_file_replaced_meanwhile_is_left_alone(self, path, who):
        """Whoever waited for the lock of a replaced file leaves the new one alone."""
        damage = b'{"id":7}\n'
        path.write_bytes(lines(FERN))
        others = lines(*(Plant(id, 'Moss') for id in range(9))) + damage + lines(IVY)
        with JSONLinesStore(path) as waiting, path.open('rb') as other:
            if who == 'opened':
                waiting.ping()
            fcntl.flock(other, fcntl.LOCK_EX)

            def use():
                call = partial(waiting.add, Plant(77, 'Oak'))
                if who == 'repair':
                    call = partial(verify, path, repair=True)
                # Opened while it was replaced, or found replaced.
                assert_raise((StoreUnavailable, StoreCorrupt), call)

            def replace():
                wait_until(lambda: open_paths().count(str(path)) > 1)
                path.with_name('new').write_bytes(others)
                path.with_name('new').replace(path)
                fcntl.flock(other, fcntl.LOCK_UN)

            in_threads(use, replace)
        assert files(path) == {path.name: others}


UNSUPPORTED = [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL]


@pytest.mark.parametrize('number', UNSUPPORTED, ids=errno.errorcode.get)
@pytest.mark.parametrize('lacking', ['locks', 'syncs'])
def test_file_system_without_locks_or_syncs(path, disk, monkeypatch, lacking, number):
    """It is refused in words that name it, as is what to do."""

    def before(name, *arguments):
        if name == 'fdatasync':
            failing(number)()

    if lacking == 'syncs':
        disk.before = before
    else:
        monkeypatch.setattr(plant_lock.fcntl, 'flock', failing(number))
    with JSONLinesStore(path) as store:
        uses = [store.ping, partial(store.add, FERN)]
        assert_raise(StoreUnavailable, *uses, *uses, match=r'\(\w+\).*local')
    assert path.read_bytes() == b''


def test_lock_held_by_another_process_or_thread(path, monkeypatch):
    """While another process or thread has the lock, every use fails in time."""
    assert plant_lock.LOCK_WITHIN < 5
    monkeypatch.setattr(plant_lock, 'LOCK_WITHIN', 0.05)
    with JSONLinesStore(path) as store, JSONLinesStore(path) as not_open:
        store.add(FERN)
        with locked(path):
            uses = partial(store.add, MOSS), store.ping, not_open.ping
            reads = partial(list, store), partial(verify, path, repair=True)
            words = f'^{path}: .* holds the lock'
            assert_raise(StoreUnavailable, *uses, *reads, match=words)
        assert not_open.add(MOSS)  # an error releases it
        store.ping()
    assert path.read_bytes() == lines(FERN, MOSS)
