"""The plant file itself: how it is made, and what happens to it under a store."""

import errno
import fcntl
import os
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from contract import FORK, at_once
from disk import Fault, Gate, append, assert_raise, assert_stored, failing, fill, lines
from machine import locked, open_files
from waiting import wait_until

from store import Plant, StoreCorrupt, StoreUnavailable, open_store
from store.jsonl import JSONLinesStore
from store.jsonl import disk as plant_disk
from store.jsonl import file as plant_file
from store.jsonl.repair import Verified, verify

FERN, MOSS, IVY = PLANTS = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Ivy')
OAK = Plant(4, 'Oak')


@pytest.mark.parametrize('mode', [None, 0o640], ids=['new', 'there'])
def test_files_have_mode_and_owner_of_the_plant_file(path, mode):
    """A new file is private, a side file is like its file, and a link is left."""
    owner = os.geteuid(), os.getegid()
    if mode:
        path.touch()
        path.chmod(mode)
        if not os.geteuid():
            os.chown(path, *(owner := (12, 34)))
    path.with_name('plants.jsonl.torn-1').symlink_to('of somebody else')
    fill(path, FERN)
    append(path, b'{"id":')
    fill(path, MOSS)
    assert not path.with_name('of somebody else').exists()
    for status in path.stat(), path.with_name('plants.jsonl.torn-2').stat():
        assert (status.st_uid, status.st_gid) == owner
        assert status.st_mode & 0o7777 == (mode or 0o600)


def test_new_file_is_made_where_a_link_leads(path, monkeypatch, caplog):
    """At once, and with a warning: its disk may not be mounted. All use one file."""
    caplog.set_level('INFO')
    monkeypatch.chdir(path.parent)
    path.with_name('link').symlink_to(path.name)
    store = open_store('jsonl:link')
    monkeypatch.chdir('/')
    assert path.read_bytes() == b''
    assert (caplog.records[0].levelname, caplog.records[0].args) == ('WARNING', (path,))
    with store, open_store(f'jsonl:{path}') as other:
        assert (store.add(FERN), other.add(FERN)) == (True, False)
        path.with_name('link').unlink()
        path.with_name('link').write_bytes(lines(FERN))  # on a larger disk
        assert_raise(StoreUnavailable, partial(store.add, MOSS), match='replaced')
    JSONLinesStore(path).load()
    assert f'{path}: it has 1 plants' in caplog.text


def test_what_is_no_file_is_refused(path):
    """At once, and untouched; also a name that leaves no room for a side file."""
    path.mkdir()
    os.mkfifo(path / 'fifo')
    (path / 'loop').symlink_to('loop')
    (path / 'file').touch()
    before = sorted(path.iterdir())
    for name in '.', 'fifo', 'loop', '/dev/null', 'no/file', 'file/file':
        with pytest.raises(StoreUnavailable) as caught:
            JSONLinesStore(path / name)
        assert str((path / name).parent) not in caught.value.reason  # clients see it
        store = JSONLinesStore(path / name, create=False)
        assert_raise(StoreUnavailable, store.ping, partial(list, store))
    assert sorted(path.iterdir()) == before
    long = JSONLinesStore(path / ('p' * (os.pathconf(path, 'PC_NAME_MAX') - 5)))
    assert_raise(StoreUnavailable, long.ping, match='too long')


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_missing_right_is_told():
    """Of the file and of its directory, by each use; a check needs none to write."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        secret, fixed = directory / 'secret', directory / 'fixed'
        for path, mode in (secret, 0), (fixed, 0o666):
            path.write_bytes(lines(FERN))
            path.chmod(mode)

        def use():
            (opened := JSONLinesStore(fixed)).ping()
            directory.chmod(0o555)
            if not os.getuid():
                os.seteuid(65534)
            ping = JSONLinesStore(fixed, create=False).ping
            uses = ping, opened.ping, partial(opened.add, FERN)
            make = partial(JSONLinesStore, directory / 'new')
            told = f'of user .* ls -ldn {directory}.*; lsattr -d'
            assert_raise(StoreUnavailable, *uses, make, match=told)
            assert verify(fixed) == Verified(1)
            repair = partial(verify, secret, repair=True)
            assert_raise(StoreUnavailable, repair, match=f'ls -ldn .* {secret}')

        at_once(FORK.Process, use)
        directory.chmod(0o755)


# What may happen to a file that is moved away: in its place, or in place.
CHANGES = {
    'gone': lambda path, away: None,
    'copy': lambda path, away: shutil.copy2(away, path),
    'shortened': lambda path, away: os.truncate(away.rename(path), len(lines(FERN))),
    'edited': lambda path, away: away.rename(path).write_bytes(lines(FERN, MOSS, OAK)),
}


@pytest.mark.parametrize('change', CHANGES.values(), ids=CHANGES)
def test_changed_file_is_refused_until_it_is_back(path, change):
    """Each use says so, nothing is made anew, and the store goes on by itself."""
    with JSONLinesStore(path) as store, JSONLinesStore(path, create=False) as unused:
        store.add_many(PLANTS)
        away = path.rename(path.with_name('away'))
        change(path, away)
        before = {it: it.read_bytes() for it in path.parent.iterdir()}
        for plant in FERN, OAK, FERN._replace(name='Reed'):
            uses = [store.ping, partial(store.add, plant)]
            uses += [unused.ping] * away.exists()  # of a worker that starts now
            assert_raise(StoreUnavailable, *uses, match='the file ')
        assert before == {it: it.read_bytes() for it in path.parent.iterdir()}
        away.rename(path) if away.exists() else path.write_bytes(lines(*PLANTS))
        assert_stored(store, PLANTS, free=[100])
        path.parent.rename(moved := path.parent.with_name('moved'))
        assert_raise(StoreUnavailable, store.ping, match='the file is not there')
        moved.rename(path.parent)


def test_reader_of_a_file_that_is_shortened_meanwhile(path, monkeypatch):
    """It ends with an error, never with fewer plants."""
    monkeypatch.setattr(plant_disk, 'CHUNK', 100)
    fill(path, *(Plant(id, 'Fern' * 9) for id in range(9)))
    next(plants := iter(JSONLinesStore(path)))
    os.truncate(path, len(lines(FERN)))
    assert_raise(StoreUnavailable, partial(list, plants), match='cut short')


def test_lines_changed_in_place_give_no_id_twice(path):
    """Also if the end is as it was: the line that an id leads to is read."""
    with open_store(f'jsonl:{path}') as store:
        store.add_many([*PLANTS, Plant(10, 'Fern' * 99)])
        path.write_bytes(path.read_bytes().replace(b'{"id":1,', b'{"id":7,'))
        adds = partial(store.add, FERN), partial(store.add, FERN._replace(name='x'))
        assert_raise(StoreUnavailable, *adds, match='reload')
        assert store.add(OAK) is True  # which needs no other line


def test_file_that_only_a_mount_keeps(path, disk):
    """It is gone: as where a container mounts a file that an editor then renames."""
    with JSONLinesStore(path) as store, path.open() as mount:
        store.add(FERN)
        path.unlink()
        disk.stat = lambda path: os.fstat(mount.fileno())
        assert_raise(StoreUnavailable, store.ping, partial(store.add, MOSS))


@pytest.mark.parametrize('who', ['opened', 'not yet', 'repair'])
def test_file_replaced_meanwhile_is_left_alone(path, who):
    """Whoever waited for the lock of a replaced file leaves the new one alone."""
    path.write_bytes(lines(FERN))
    others = lines(*(Plant(id, 'Moss') for id in range(9))) + b'{"id":7}\n' + lines(IVY)
    with JSONLinesStore(path) as waiting, ThreadPoolExecutor(1) as pool:
        use = partial(waiting.add, Plant(77, 'Oak'))
        if who == 'opened':
            waiting.ping()
        elif who == 'repair':
            use = partial(verify, path, repair=True)
        with locked(path):
            used = pool.submit(use)
            wait_until(lambda: [*open_files().values()].count(str(path)) > 1)
            path.with_name('new').write_bytes(others)
            path.with_name('new').replace(path)
        # Opened while it was replaced, or found replaced.
        assert isinstance(used.exception(), (StoreUnavailable, StoreCorrupt))
    assert (path.read_bytes(), [*path.parent.iterdir()]) == (others, [path])


def test_lock_held_by_another_process_or_thread(path, monkeypatch, caplog):
    """Every use fails in time; a load waits as for a repair of minutes, and says so."""
    assert plant_disk.LOCK_WITHIN < 5
    monkeypatch.setattr(plant_disk, 'LOCK_WITHIN', 0.05)
    monkeypatch.setattr(plant_disk, 'SAID_AFTER', 0.2)
    store, not_open = JSONLinesStore(path), JSONLinesStore(path)
    with store, not_open, ThreadPoolExecutor(1) as pool:
        store.add(FERN)
        with locked(path):
            loaded = pool.submit(JSONLinesStore(path).load)
            uses = partial(store.add, MOSS), store.ping, not_open.ping
            reads = partial(list, store), partial(verify, path, repair=True)
            words = f'^{path}: .* holds the lock'
            assert_raise(StoreUnavailable, *uses, *reads, match=words)
            wait_until(lambda: f'{path}: waiting: ' in caplog.text)
            assert not loaded.done()
        assert loaded.result() is None
        assert not_open.add(MOSS)  # an error releases it
        store.ping()
    assert path.read_bytes() == lines(FERN, MOSS)


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_no_file_is_a_standard_stream(path):
    """What is written to a closed stream is in no plant file, nor a plant in others."""

    def use():
        os.closerange(0, 3)
        with JSONLinesStore(path) as store:
            store.add(FERN)
            for number in range(3):
                os.write(number, b'a message of a C library, in a place of its own')
            store.add(MOSS)
        with JSONLinesStore(path.with_name('new')) as store:
            store.ping()
            os.closerange(3, 99)  # as a host does that becomes a daemon
            _ = [os.open(path, os.O_RDWR) for _ in range(99)]
            assert_raise(StoreUnavailable, partial(store.add, OAK))

    at_once(FORK.Process, use)
    assert path.read_bytes() == lines(FERN, MOSS)


@pytest.mark.skipif(not hasattr(fcntl, 'F_SETLEASE'), reason='of Linux')
def test_lease_of_another_program_is_waited_for(path):
    """As Samba has one: an open waits until it is given back."""
    fill(path, FERN)
    store, before = JSONLinesStore(path), signal.signal(signal.SIGIO, signal.SIG_IGN)
    with path.open('rb+') as held, store, ThreadPoolExecutor(1) as pool:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        added = pool.submit(store.add, MOSS)
        with pytest.raises(TimeoutError):
            added.result(0.1)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        assert added.result()
    signal.signal(signal.SIGIO, before)


@pytest.mark.parametrize('torn', [b'', b'{"id":7,"na'])
def test_many_lines_are_read_without_the_lock(path, disk, monkeypatch, caplog, torn):
    """Others go on beside a store that is far behind, or that opens, and says so."""
    caplog.set_level('INFO')
    monkeypatch.setattr('store.jsonl.known.PROGRESS_EVERY', -1)
    monkeypatch.setattr(plant_file, 'NEAR', 1000)
    far = [Plant(id, 'Oak' * 99) for id in range(100, 120)]
    with JSONLinesStore(path) as store, JSONLinesStore(path) as other:
        store.add(FERN)
        other.add_many(far)
        append(path, torn)
        gate, is_far = Gate(), range(1000, 100_000).__contains__
        disk.before = Fault('pread', 1, lambda fd, it, _: is_far(it) and gate(), True)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(store.add, MOSS)
            gate.wait_for()
            assert other.add(OAK)
            gate.set()
            assert late.result()
        disk.resume()
        # The last lines are read under it.
        assert ('% read' in caplog.text, '100 % read' in caplog.text) == (True, False)
        assert_stored(store, [FERN, MOSS, OAK, *far])


@pytest.mark.parametrize('is_open', [True, False], ids=['open', 'not-yet'])
def test_damage_is_judged_once(path, disk, monkeypatch, is_open):
    """Each add meets it; all is read again if it is mended, as rsync --inplace does."""
    monkeypatch.setattr(plant_file, 'NEAR', 1000)
    sizes, far = [], [Plant(id, 'Oak' * 99) for id in range(100, 120)]
    with JSONLinesStore(path) as store:
        if is_open:
            store.ping()
        damage = lines(rival := FERN._replace(id=100)) + b' \n' * 10**4
        path.write_bytes(lines(*far) + damage)
        before = path.stat()
        count = len(lines(*far)), 0  # what is read for the number of the line
        disk.before = lambda name, *call: call[1:] == count and failing(errno.EIO)()
        uses, told = (store.ping, store.load), f'{path}: {os.strerror(errno.EIO)}'
        assert_raise(StoreUnavailable, *uses, match=told)
        disk.resume()
        assert_raise(StoreCorrupt, store.ping)
        disk.before = lambda name, *call: name == 'pread' and sizes.append(call[1])
        assert_raise(StoreCorrupt, store.ping, partial(store.add, MOSS))
        assert sum(sizes) < 3000
        disk.resume()
        far[0] = far[0]._replace(id=200)
        while path.stat().st_ctime_ns == before.st_ctime_ns:  # a clock ticks slowly
            path.write_bytes(lines(*far) + damage)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert_stored(store, [*far, rival], free=[FERN.id])


def test_bulk_add_writes_little_at_once(path, disk):
    """A write has 1 MiB, in bytes, or one plant: so much may be unsynced at a crash."""
    sizes = []
    with JSONLinesStore(path) as store:
        disk.before = lambda name, *it: name == 'pwrite' and sizes.append(len(it[1]))
        store.add_many(Plant(id, '\1' * 50_000) for id in range(20))
    assert (len(sizes) > 5, max(sizes) <= 2**20) == (True, True)
