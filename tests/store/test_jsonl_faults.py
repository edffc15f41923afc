"""The file store on a disk that fails, and that loses unsynced writes."""

import contextlib
import errno
import itertools
import json
import os
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from store import IdTaken, Plant, StoreUnavailable, group_commit
from store.jsonl import JSONLinesStore, record
from store.testing import PATIENCE, wait_until

FERN, MOSS, IVY, REED, OAK, ASH = (
    Plant(number, name, 'shade' if number % 2 else None)
    for number, name in enumerate(('Fern', 'Moss', 'Ivy', 'Reed', 'Oak', 'Ash'), 1)
)
TORN = b'{"id":7,"na'


class Killed(BaseException):
    """The process is killed here; as a BaseException it passes every handler.

    Attributes:
        written: How many bytes of a write were written before.
    """

    def __init__(self, written=0):
        super().__init__()
        self.written = written


class Disk:
    """System calls on a disk that can fail, and that loses unsynced writes.

    It models one plant file. A write is durable when a sync that began after it has
    succeeded. The writes that a failed sync covers are lost for good, though they can
    still be read: a later sync finds nothing to do. As on Linux, the failure is
    reported once on each descriptor that was open.

    Attributes:
        path: The path of the plant file.
        durable: The content of the plant file on the disk.
        named: Whether the file's directory entry is on the disk.
        calls: The name of each call, its descriptor or path, and its further arguments.
        before: Called with the same before each call. It may block or raise; after a
            ``Killed`` every call only raises it again. If it returns a number, a
            pwrite writes no more bytes than that.
    """

    def __init__(self, path):
        self.path = path
        self.durable = b''
        self.named = False
        self.calls = []
        self.before = no_fault
        self._changes = []  # offset and bytes of each write, None for a truncation
        self._settled = 0  # the changes before this index are durable, or lost
        self._failures = 0
        self._reported = {}  # from each descriptor to the failures reported on it
        self._lock = threading.Lock()
        self._killed = False

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, mode=0o777):
        self._enter('open', path, flags)
        fd = os.open(path, flags, mode)
        self._reported[fd] = self._failures
        return fd

    def pwrite(self, fd, data, offset):
        try:
            limit = self._enter('pwrite', fd, data, offset)
        except Killed as ex:
            self._write(fd, data[: ex.written], offset)
            raise
        return self._write(fd, data[:limit], offset)

    def ftruncate(self, fd, size):
        self._enter('ftruncate', fd, size)
        os.ftruncate(fd, size)
        self._changes.append((size, None))

    def rename(self, path, target):
        self._enter('rename', path, target)
        os.rename(path, target)

    def unlink(self, path):
        self._enter('unlink', path)
        os.unlink(path)

    def fdatasync(self, fd):
        self._sync('fdatasync', fd)

    def fsync(self, fd):
        self._sync('fsync', fd)

    def skip_failures(self, fd):
        """Do not report the failures so far on this descriptor."""
        self._reported[fd] = self._failures

    def unsynced(self):
        """Return how many written bytes are not durable."""
        return sum(len(data or b'') for _, data in self._changes[self._settled :])

    def image(self, keep=0, zeroed=False):
        """Return what a power cut would leave of the file.

        Args:
            keep: How many of the unsynced bytes reached the disk nevertheless.
            zeroed: Whether the other unsynced bytes are zeros, not missing.
        """
        content = self.durable
        for offset, data in self._changes[self._settled :]:
            if data is not None:
                kept = data[:keep]
                keep -= len(kept)
                content = changed(content, offset, kept)
                if zeroed:
                    content = content.ljust(offset + len(data), b'\0')
            elif keep:
                content = content[:offset]
        return content

    def images(self):
        """Return every content that a power cut could leave."""
        lengths = range(self.unsynced() + 1)
        return {
            self.image(keep, zeroed) for keep in lengths for zeroed in (False, True)
        }

    def restart(self, content):
        """Continue after a power cut.

        Args:
            content: The content of the file; ``None`` if its name was not durable.
        """
        if content is None:
            self.path.unlink(missing_ok=True)
            self.named = False
        else:
            self.path.write_bytes(content)
        self.durable = content or b''
        self.resume()
        self._changes.clear()
        self._settled = 0

    def resume(self):
        """Continue with the disk as it is, without further faults."""
        self._killed = False
        self.before = no_fault

    def _enter(self, name, target, *arguments):
        if self._killed:
            raise Killed
        self.calls.append((name, target, *arguments))
        try:
            return self.before(name, target, *arguments)
        except Killed:
            self._killed = True
            raise

    def _is_plant_file(self, fd):
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.stat(self.path))

    def _write(self, fd, data, offset):
        with self._lock:
            if self._is_plant_file(fd):
                self._changes.append((offset, data))
            return os.pwrite(fd, data, offset)

    def _sync(self, name, fd):
        began = len(self._changes)
        of_plants = self._is_plant_file(fd)
        try:
            self._enter(name, fd)
            if of_plants and self._reported[fd] < self._failures:
                raise failure(errno.EIO)
        except OSError:
            if of_plants:
                with self._lock:
                    self._settle(began, durable=False)
                self._failures += self._reported[fd] == self._failures
                self._reported[fd] = self._failures
            raise
        if of_plants:
            with self._lock:
                self._settle(began, durable=True)
        elif stat.S_ISDIR(os.fstat(fd).st_mode):
            self.named = True

    def _settle(self, end, durable):
        for offset, data in self._changes[self._settled : end]:
            if data is None:
                self.durable = self.durable[:offset]
            elif durable:
                self.durable = changed(self.durable, offset, data)
        self._settled = max(self._settled, end)


def changed(content, offset, data):
    """Return bytes after a write into them; a gap before it is filled with zeros."""
    before = content[:offset].ljust(offset, b'\0') if data else content[:offset]
    return before + data + content[offset + len(data) :]


def no_fault(name, *arguments):
    """Let every call succeed."""


def failure(number):
    """Return the error that a failing system call raises."""
    return OSError(number, os.strerror(number))


@pytest.fixture
def disk(path):
    """Return a disk without faults, on which there is no plant file yet."""
    return Disk(path)


@pytest.fixture
def slow_syncs(monkeypatch):
    """Let every sync appear to take a second, so that several may be in flight."""
    ticks = itertools.count()
    monkeypatch.setattr(group_commit, 'perf_counter', lambda: next(ticks))


def index_of(path):
    """Return the path of the index of a plant file."""
    return path.with_name(path.name + '.index')


def side_files(path):
    """Return the kept torn tails: the content of each side file, by its path."""
    return {side: side.read_bytes() for side in path.parent.glob('*.torn-*')}


def raw_plants(content):
    """Return the plants of a sound file, read without the store's code."""
    assert not content or content.endswith(b'\n')
    return [Plant(**json.loads(line)) for line in content.split(b'\n')[:-1]]


def lines(*plants):
    """Return the records of plants."""
    return b''.join(map(record.encode, plants))


def try_add(store, plant, times=1):
    """Add a plant with retries, as a client does; return whether it was stored."""
    for _ in range(times):
        try:
            store.add(plant)
        except StoreUnavailable:
            continue
        return True
    return False


class Gate:
    """Blocks every fdatasync, and fails those that the test selects.

    Attributes:
        held: The descriptors of the blocked syncs, in order of arrival.
        failing: The descriptors whose sync fails.
        then: The value of ``disk.before`` once the gate is open.
    """

    def __init__(self, disk):
        self.held = []
        self.failing = set()
        self.then = no_fault
        self._disk = disk
        self._change = threading.Condition()
        self._released = set()
        self._open = False

    def __enter__(self):
        self._disk.before = self._hold
        return self

    def __exit__(self, *exc_info):
        self._disk.before = self.then
        with self._change:
            self._open = True
            self._change.notify_all()

    def release(self, fd):
        with self._change:
            self._released.add(fd)
            self._change.notify_all()

    def add_each(self, pool, store, *plants):
        """Add plants, each in its own thread and with its own blocked sync."""
        adds = []
        for plant in plants:
            adds.append(pool.submit(store.add, plant))
            self.wait_for(len(adds))
        return adds

    def wait_for(self, count):
        """Wait until so many syncs are blocked."""
        wait_until(lambda: len(self.held) >= count)

    def _hold(self, name, fd, *arguments):
        if name == 'fdatasync':
            with self._change:
                self.held.append(fd)
                passes = lambda: self._open or fd in self._released  # noqa: E731
                assert self._change.wait_for(passes, PATIENCE)
            if fd in self.failing:
                raise failure(errno.EIO)


@pytest.fixture
def pool():
    """Return an executor of threads."""
    with ThreadPoolExecutor(32) as pool:
        yield pool


class CrashingStore(RuleBasedStateMachine):
    """A store whose process is killed and whose machine loses power, and its model.

    Attributes:
        plants: The plants that the file certainly holds, by id.
        pending: The plant whose add was interrupted, or ``None``.
    """

    directory = None  # set by the test

    @initialize()
    def begin(self):
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        self.disk = Disk(directory / 'plants.jsonl')
        self.plants = {}
        self.pending = None
        self.open()

    def open(self):
        self.store = JSONLinesStore(self.disk.path, system=self.disk)

    @rule(
        id=st.integers(-3, 3),
        name=st.sampled_from(['Fern', 'Gräser 🌱', '\n"']),
        tag=st.sampled_from([None, '', 'shade']),
    )
    def add(self, id, name, tag):
        plant = Plant(id, name, tag)
        self.settle()
        if self.plants.setdefault(id, plant) == plant:
            self.store.add(plant)
        else:
            with pytest.raises(IdTaken):
                self.store.add(plant)
        self.check()

    @rule(id=st.integers(-3, 3))
    def repeat(self, id):
        self.settle()
        if id in self.plants:
            self.store.add(self.plants[id])
            self.check()

    @rule()
    def close(self):
        self.store.close()
        self.open()

    @rule(
        id=st.integers(-3, 3),
        name=st.sampled_from(['Fern', 'Moss']),
        calls=st.integers(0, 3) | st.integers(4, 14),
        written=st.integers(0, 30),
    )
    def kill(self, id, name, calls, written):
        """Kill the process at one of its calls, perhaps in the middle of a write."""
        plant = Plant(id, name)
        if self.pending:
            self.settle()
        remaining = itertools.count(calls, -1)

        def kill(name, *arguments):
            if not next(remaining):
                raise Killed(written)

        self.disk.before = kill
        try:
            self.store.add(plant)
        except Killed:
            self.pending = plant
        except IdTaken:
            assert self.plants[plant.id] != plant
        else:
            assert self.plants.setdefault(plant.id, plant) == plant
        self.store.close()
        self.disk.resume()
        self.open()

    @rule(
        keep=st.integers(0, 40),
        zeroed=st.booleans(),
        with_index=st.booleans(),
        with_name=st.booleans(),
    )
    def cut_power(self, keep, zeroed, with_index, with_name):
        self.store.close()
        with_name |= self.disk.named
        image = self.disk.image(keep, zeroed) if with_name else None
        self.disk.restart(image)
        if not (with_index and with_name):
            index_of(self.disk.path).unlink(missing_ok=True)
        self.open()

    def settle(self):
        """Open the store, and find out whether the pending plant is stored."""
        self.store.ping()
        pending, self.pending = self.pending, None
        if pending in raw_plants(self.disk.path.read_bytes()):
            assert self.plants.setdefault(pending.id, pending) == pending
        self.check()

    def check(self):
        content = self.disk.path.read_bytes()
        assert sorted(raw_plants(content)) == sorted(self.plants.values())
        assert self.disk.durable == content
        assert self.disk.named

    def teardown(self):
        self.store.close()


class TestPowerCut:
    def test_random_crashes_lose_no_acknowledged_plant(self, tmp_path):
        """Random adds, kills and power cuts agree with a model in a dict."""
        CrashingStore.directory = tmp_path
        run_state_machine_as_test(
            CrashingStore,
            settings=settings(max_examples=40, stateful_step_count=20, deadline=None),
        )

    def test_cut_is_synced_before_the_next_write(self, path, disk):
        """A power cut must not mix bytes of a torn tail with those of a new line."""
        torn_line(disk)
        with JSONLinesStore(path, system=disk) as store:
            store.add(IVY)
        names = [name for name, *_ in disk.calls]
        cut = names.index('ftruncate')
        assert disk.calls[cut + 1] == ('fdatasync', disk.calls[cut][1])
        assert 'pwrite' in names[cut + 1 :]

    @pytest.mark.parametrize('with_index', [True, False], ids=['index', 'no-index'])
    def test_every_content_that_a_power_cut_leaves(
        self, path, disk, slow_syncs, pool, with_index
    ):
        """Whole lines of unsynced plants survive, in order; a torn tail is kept."""
        waiting = [IVY, REED, OAK]
        with JSONLinesStore(path, system=disk) as store:
            for plant in (FERN, MOSS):
                store.add(plant)
            with Gate(disk) as gate:
                adds = gate.add_each(pool, store, *waiting)
                plants = raw_plants(path.read_bytes())
                index = index_of(path).read_bytes()
                images = disk.images()
            assert all(add.result(PATIENCE) for add in adds)
        assert len(images) > len(lines(*waiting))
        for image in images:
            disk.restart(image)
            index_of(path).write_bytes(index)
            if not with_index:
                index_of(path).unlink()
            survivors = plants[: image.count(b'\n')]
            torn = image.removeprefix(lines(*survivors))
            with JSONLinesStore(path, system=disk) as store:
                store.add(ASH)
                assert list(store) == [*survivors, ASH]
            assert list(side_files(path).values()) == [torn] * bool(torn)
            for side in side_files(path):
                side.unlink()


class Fault:
    """Makes the n-th call of one function fail, or all from the n-th on.

    Args:
        call: The name of the function.
        nth: The number of the call, from 1.
        effect: Called with the call's arguments; it raises, or returns a limit.
        lasting: Whether the calls after it fail too.
    """

    def __init__(self, call, nth, effect, lasting=False):
        self._call = call
        self._nth = nth
        self._effect = effect
        self._lasting = lasting
        self._count = 0

    @property
    def reached(self):
        return self._count >= self._nth

    def __call__(self, name, *arguments):
        if name != self._call:
            return None
        self._count += 1
        due = self.reached if self._lasting else self._count == self._nth
        return self._effect(*arguments) if due else None


def failing(number):
    """Return an effect: the call fails with an error number."""

    def effect(*arguments):
        raise failure(number)

    return effect


def short(fd, data, offset):
    """Write only half of the data."""
    return max(1, len(data) // 2)


def failing_at_open(path):
    """Return a fault: every fsync of the plant file fails, as the one of an open."""

    def effect(fd):
        if os.path.samestat(os.fstat(fd), path.stat()):
            raise failure(errno.EIO)

    return Fault('fsync', 1, effect, lasting=True)


ERRORS = [errno.ENOSPC, errno.EIO, errno.EINTR]
CALLS = ['open', 'pwrite', 'fdatasync', 'fsync', 'ftruncate', 'rename', 'unlink']
# The store does not tell errors apart: each call fails with one, the writes with all.
FAILURES = [
    *((call, errno.EIO) for call in CALLS),
    *((call, errno.ENOSPC) for call in ('open', 'pwrite')),
    *((call, errno.EINTR) for call in ('pwrite', 'fdatasync')),
]
EFFECTS = {
    f'{call}-{errno.errorcode[number]}': (call, failing(number))
    for call, number in FAILURES
} | {'pwrite-short': ('pwrite', short)}


def no_file(disk):
    """Start without a plant file. Like the others, return the acknowledged plants."""
    return set()


def unsynced_line(disk, torn=b'', with_index=False):
    """Start with the file of a process that was killed before its sync."""
    store = JSONLinesStore(disk.path, system=disk)
    store.add(FERN)
    store.close()
    if not with_index:
        index_of(disk.path).unlink()
    fd = disk.open(disk.path, os.O_WRONLY)
    disk.pwrite(fd, lines(MOSS) + torn, disk.path.stat().st_size)
    os.close(fd)
    return {FERN}


def torn_line(disk):
    """Start with the file of a process that was killed during a write."""
    return unsynced_line(disk, TORN)


def torn_line_and_index(disk):
    """Start with such a file, and an index that covers its first line."""
    return unsynced_line(disk, TORN, with_index=True)


class TestEveryCall:
    @pytest.mark.parametrize('lasting', [False, True], ids=['once', 'lasting'])
    @pytest.mark.parametrize(('call', 'effect'), EFFECTS.values(), ids=EFFECTS)
    @pytest.mark.parametrize(
        'prepare', [no_file, unsynced_line, torn_line, torn_line_and_index]
    )
    def test_failing_call_loses_nothing(self, tmp_path, prepare, call, effect, lasting):
        """Whichever call fails, acknowledged plants stay and the file is sound."""
        plants = [FERN, MOSS, IVY, REED, OAK, ASH]
        for nth in itertools.count(1):
            disk = Disk(tmp_path / str(nth) / 'plants.jsonl')
            disk.path.parent.mkdir()
            acknowledged = prepare(disk)
            disk.before = fault = Fault(call, nth, effect, lasting)
            for _ in range(2):
                with JSONLinesStore(disk.path, system=disk) as store:
                    acknowledged.update(
                        plant for plant in plants if try_add(store, plant, times=2)
                    )
            disk.resume()
            self.check(disk, acknowledged, set(plants))
            if not fault.reached:
                break
        assert acknowledged == set(plants)

    def check(self, disk, acknowledged, offered):
        """Check the file as it is, and some contents that a power cut could leave."""
        unsynced = disk.unsynced()
        contents = {disk.image(), disk.image(unsynced // 2), disk.image(zeroed=True)}
        if disk.path.exists():
            contents.add(disk.path.read_bytes())
        if not disk.named:
            assert not acknowledged
        index = index_of(disk.path)
        manifest = index.read_bytes() if index.exists() else None
        for content in contents:
            disk.restart(content)
            index.unlink(missing_ok=True)
            if manifest is not None:
                index.write_bytes(manifest)
            with JSONLinesStore(disk.path, system=disk) as store:
                store.ping()
            stored = raw_plants(disk.path.read_bytes())
            assert acknowledged <= set(stored) <= offered
            assert len(stored) == len(set(stored))


class TestFullDisk:
    @pytest.fixture
    def store(self, path, disk):
        """Return an open store with one plant."""
        with JSONLinesStore(path, system=disk) as store:
            store.add(FERN)
            yield store

    @pytest.mark.parametrize(
        'number', [*ERRORS, errno.EDQUOT, errno.EROFS, errno.EACCES]
    )
    def test_failed_write_leaves_no_byte(self, path, disk, store, number):
        """A failed write is rolled back; adds work again once writes do."""
        disk.before = Fault('pwrite', 1, failing(number), lasting=True)
        for plant in (MOSS, IVY, MOSS):
            with pytest.raises(StoreUnavailable) as caught:
                store.add(plant)
            assert caught.value.reason == os.strerror(number)
            assert path.read_bytes() == lines(FERN)
        store.add(FERN)
        with pytest.raises(IdTaken):
            store.add(FERN._replace(name='Moss'))
        disk.resume()
        store.add(MOSS)
        assert path.read_bytes() == disk.durable == lines(FERN, MOSS)

    @pytest.mark.parametrize('number', [errno.EIO, errno.EDQUOT])
    @pytest.mark.parametrize('written', [0, 5])
    def test_not_ready_until_a_write_works(self, path, disk, store, number, written):
        """After a failed write the store is not ready until writes succeed."""

        def effect(fd, data, offset):
            if offset > len(lines(FERN)) or not written:
                raise failure(number)
            return written

        disk.before = Fault('pwrite', 1, effect, lasting=True)
        with pytest.raises(StoreUnavailable):
            store.add(MOSS)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                store.ping()
            assert path.read_bytes() == lines(FERN)
        disk.resume()
        for _ in range(2):
            store.ping()
            assert path.read_bytes() == lines(FERN)
        store.add(MOSS)
        assert disk.durable == lines(FERN, MOSS)

    def test_partial_write_is_rolled_back(self, path, disk, store):
        """A short write that then fails is rolled back completely."""
        limits = iter([5, 1])

        def effect(*arguments):
            for limit in limits:
                return limit
            raise failure(errno.ENOSPC)

        disk.before = Fault('pwrite', 1, effect, lasting=True)
        with pytest.raises(StoreUnavailable):
            store.add(MOSS)
        assert path.read_bytes() == lines(FERN)
        disk.resume()
        store.add(IVY)
        assert disk.durable == lines(FERN, IVY)

    def test_short_writes_are_completed(self, disk, store):
        """Short writes of one byte each are continued to the end."""
        disk.before = Fault('pwrite', 1, lambda *arguments: 1, lasting=True)
        store.add(MOSS)
        assert disk.durable == lines(FERN, MOSS)

    def test_write_of_zero_bytes_is_an_error(self, path, disk, store):
        """A write that returns 0 is an error, not an endless loop."""
        disk.before = Fault('pwrite', 1, lambda *arguments: 0, lasting=True)
        with pytest.raises(StoreUnavailable):
            store.add(MOSS)
        assert path.read_bytes() == lines(FERN)

    def test_failed_rollback_is_made_up_for(self, path, disk, store):
        """A partial line that cannot be rolled back is cut off once that works."""
        limits = iter([5])

        def before(name, *arguments):
            if name in ('pwrite', 'ftruncate'):
                for limit in limits:
                    return limit
                raise failure(errno.EIO)
            return None

        disk.before = before
        for plant in (MOSS, MOSS, IVY, FERN):
            with pytest.raises(StoreUnavailable):
                store.add(plant)
        assert path.read_bytes() == lines(FERN) + lines(MOSS)[:5]
        disk.resume()
        store.add(IVY)
        assert disk.durable == lines(FERN, IVY)
        assert set(side_files(path).values()) == {lines(MOSS)[:5]}

    @pytest.mark.parametrize('call', ['fsync', 'ftruncate'])
    def test_failed_cut_makes_one_side_file(self, path, disk, store, call):
        """A torn tail that cannot be cut off does not make a file per attempt."""
        with path.open('ab') as file:
            file.write(TORN)
        disk.before = Fault(call, 1, failing(errno.ENOSPC), lasting=True)
        for _ in range(5):
            with pytest.raises(StoreUnavailable):
                store.add(MOSS)
        assert path.read_bytes() == lines(FERN) + TORN
        assert len(side_files(path)) <= 1
        disk.resume()
        store.add(MOSS)
        assert TORN in side_files(path).values()

    @pytest.mark.parametrize('number', [errno.EROFS, errno.EACCES, errno.EMFILE])
    def test_failed_open_is_unavailable(self, path, disk, number):
        """A store whose file cannot be opened is unavailable until it can."""
        disk.before = Fault('open', 1, failing(number), lasting=True)
        with JSONLinesStore(path, system=disk) as store:
            for attempt in (store.ping, lambda: store.add(FERN)):
                with pytest.raises(StoreUnavailable, match=os.strerror(number)):
                    attempt()
            disk.resume()
            store.ping()
            store.add(FERN)
        assert disk.durable == lines(FERN)


def spoil(index):
    """Overwrite every byte of an index."""
    index.write_bytes(b'?' * index.stat().st_size)


class TestFailedSync:
    @pytest.fixture
    def doubtful(self, path, disk):
        """Return an open store whose second plant is in doubt: its sync failed."""
        with JSONLinesStore(path, system=disk) as store:
            store.add(FERN)
            disk.before = Fault('fdatasync', 1, failing(errno.EIO))
            with pytest.raises(StoreUnavailable):
                store.add(MOSS)
            disk.resume()
            yield store

    def test_store_refuses_after_a_failed_sync(self, path, disk, doubtful):
        """After a failed sync a store refuses every add, even a repeat."""
        for _ in range(2):
            for plant in (MOSS, IVY, FERN):
                with pytest.raises(StoreUnavailable):
                    doubtful.add(plant)
            with pytest.raises(StoreUnavailable):
                doubtful.ping()
        assert path.read_bytes() == lines(FERN, MOSS)
        assert disk.durable == lines(FERN)

    @pytest.mark.parametrize('number', ERRORS)
    def test_failed_sync_is_never_retried(self, path, disk, number):
        """A failed sync is not just repeated, whatever its error is."""
        with JSONLinesStore(path, system=disk) as store:
            store.ping()
            disk.before = Fault('fdatasync', 1, failing(number))
            assert not try_add(store, FERN, times=3)

    def test_next_open_writes_doubtful_lines_again(self, path, disk, doubtful):
        """A store that opens after a failed sync writes the lines in doubt again."""
        doubtful.close()
        del disk.calls[:]
        with JSONLinesStore(path, system=disk) as store:
            store.add(MOSS)
            (fd, data, offset), *others = (
                arguments
                for name, *arguments in disk.calls
                if name == 'pwrite' and arguments[1].startswith(b'{')
            )
            assert not others
            assert lines(FERN, MOSS)[offset:] == data
            assert offset <= len(lines(FERN))
            written = disk.calls.index(('pwrite', fd, data, offset))
            assert 'fsync' in [name for name, *_ in disk.calls[written:]]
        assert disk.durable == lines(FERN, MOSS)

    def test_lines_stay_in_doubt_while_syncs_fail(self, path, disk, doubtful):
        """Lines in doubt stay so while the syncs of each open fail."""
        doubtful.close()
        with JSONLinesStore(path, system=disk) as store:
            disk.before = failing_at_open(path)
            for _ in range(3):
                assert not try_add(store, MOSS)
            disk.resume()
            disk.before = Fault('fdatasync', 1, failing(errno.EIO))
            assert not try_add(store, MOSS)
            disk.resume()
        with JSONLinesStore(path, system=disk) as store:
            store.add(MOSS)
        assert disk.durable == lines(FERN, MOSS)

    def test_another_store_writes_doubtful_lines_again(self, path, disk, doubtful):
        """Another store writes lines in doubt again, also while the first is open."""
        with JSONLinesStore(path, system=disk) as store:
            store.add(MOSS)
            assert disk.durable == lines(FERN, MOSS)

    @pytest.mark.parametrize('lose', [Path.unlink, spoil])
    def test_lines_stay_in_doubt_without_the_index(self, path, disk, doubtful, lose):
        """Lines in doubt are known without the index, which is disposable."""
        doubtful.close()
        lose(index_of(path))
        with JSONLinesStore(path, system=disk) as store:
            store.add(MOSS)
        assert disk.durable == lines(FERN, MOSS)

    def test_lines_in_doubt_are_known_beside_a_new_index(self, path, disk):
        """Lines in doubt are known to stores that already use a new index."""
        store, other, third = (JSONLinesStore(path, system=disk) for _ in range(3))
        with store, other, third:
            store.add(FERN)
            index_of(path).unlink()
            other.ping()
            disk.before = Fault('fdatasync', 1, failing(errno.EIO))
            assert not try_add(store, MOSS)
            disk.resume()
            third.add(MOSS)
            assert disk.durable == lines(FERN, MOSS)

    @pytest.mark.parametrize('with_index', [True, False], ids=['index', 'no-index'])
    @pytest.mark.parametrize('torn', [b'', TORN], ids=['whole', 'torn'])
    @pytest.mark.parametrize('reuse', [True, False], ids=['same-store', 'another'])
    def test_failed_sync_of_an_open(self, path, disk, torn, with_index, reuse):
        """A failed sync of an open leaves the lines of other processes in doubt."""
        unsynced_line(disk, torn, with_index)
        disk.before = failing_at_open(path)
        with JSONLinesStore(path, system=disk) as store:
            with pytest.raises(StoreUnavailable):
                store.ping()
            disk.resume()
            if reuse:
                try_add(store, MOSS)
        with JSONLinesStore(path, system=disk) as store:
            store.add(MOSS)
        assert disk.durable == lines(FERN, MOSS)

    def test_failed_sync_of_a_cut(self, path, disk):
        """A failed sync after a torn tail was cut off leaves the rest in doubt."""
        with JSONLinesStore(path, system=disk) as store:
            store.add(FERN)
            fd = disk.open(path, os.O_WRONLY)
            disk.pwrite(fd, lines(MOSS) + TORN, len(lines(FERN)))
            os.close(fd)
            disk.before = Fault('fdatasync', 1, failing(errno.EIO))
            assert not try_add(store, IVY)
            if try_add(store, MOSS):
                assert lines(FERN, MOSS) in disk.durable
        with JSONLinesStore(path, system=disk) as store:
            store.add(MOSS)
        assert lines(FERN, MOSS) in disk.durable

    def test_file_exchanged_during_open(self, path, disk):
        """A store whose file was exchanged while it opened syncs the file it writes."""
        path.touch()
        other = path.with_name('other')
        other.touch()
        opened = []

        def exchange(name, target, *arguments):
            if name == 'open':
                opened.append(target == path)
                back = not opened[-1] and opened.count(False) == 1
                if opened == [True, True] or back:
                    path.rename(path.with_name('third'))
                    other.rename(path)
                    path.with_name('third').rename(other)

        disk.before = exchange
        with JSONLinesStore(path, system=disk) as store:
            assert not try_add(store, FERN) or disk.durable == lines(FERN)
        assert opened.count(True) > 1

    def test_failed_sync_during_close(self, path, disk, pool):
        """A sync that fails during a close leaves its line in doubt, too."""
        store = JSONLinesStore(path, system=disk)
        store.add(FERN)
        with Gate(disk) as gate:
            add = pool.submit(store.add, MOSS)
            gate.wait_for(1)
            close = pool.submit(store.close)
            with contextlib.suppress(TimeoutError):
                close.result(0.1)
            gate.failing.update(gate.held)
        with pytest.raises(StoreUnavailable):
            add.result(PATIENCE)
        close.result(PATIENCE)
        with JSONLinesStore(path, system=disk) as store:
            store.add(MOSS)
        assert disk.durable == lines(FERN, MOSS)

    def test_failure_reaches_every_sync_in_flight(self, path, disk, pool, slow_syncs):
        """Each sync in flight has its own descriptor, so each learns of a failure."""
        with JSONLinesStore(path, system=disk) as store:
            store.add(FERN)
            with Gate(disk) as gate:
                adds = gate.add_each(pool, store, MOSS, IVY)
                assert len(set(gate.held)) == 2
                gate.failing.add(gate.held[0])
                gate.release(gate.held[0])
                wait_until(lambda: any(add.done() for add in adds))
            for add in adds:
                with pytest.raises(StoreUnavailable):
                    add.result(PATIENCE)
        assert disk.durable == lines(FERN)

    def test_syncs_in_flight_share_no_descriptor(self, path, disk, pool, slow_syncs):
        """At the most syncs in flight, each still has its own descriptor."""
        plants = [Plant(number, 'Fern') for number in range(10, 30)]
        most = group_commit.SLOW_SYNCS_IN_FLIGHT
        with JSONLinesStore(path, system=disk) as store:
            store.add(FERN)
            with Gate(disk) as gate:
                adds = gate.add_each(pool, store, *plants[:most])
                adds += [pool.submit(store.add, plant) for plant in plants[most:]]
                assert len(set(gate.held)) == len(gate.held) == most
            assert all(add.result(PATIENCE) for add in adds)
        assert sorted(raw_plants(disk.durable)) == [FERN, *plants]

    def test_success_after_a_failed_sync_is_not_believed(
        self, path, disk, pool, slow_syncs
    ):
        """After a failed sync another one in flight counts as failed, too."""
        with JSONLinesStore(path, system=disk) as store:
            store.add(FERN)
            with Gate(disk) as gate:
                adds = gate.add_each(pool, store, MOSS, IVY)
                first, second = gate.held
                gate.failing.add(first)
                gate.release(first)
                wait_until(lambda: any(add.done() for add in adds))
                disk.skip_failures(second)
            for add in adds:
                with pytest.raises(StoreUnavailable):
                    add.result(PATIENCE)


class TestRepeat:
    @pytest.mark.parametrize('slow', [True, False], ids=['slow-disk', 'quick-disk'])
    @pytest.mark.parametrize('shared', [True, False], ids=['same-store', 'another'])
    def test_repeat_waits_for_a_sync(self, path, disk, pool, request, slow, shared):
        """A repeat of a plant that is not durable yet waits for a sync."""
        if slow:
            request.getfixturevalue('slow_syncs')
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(JSONLinesStore(path, system=disk))
            other = store
            if not shared:
                other = stack.enter_context(JSONLinesStore(path, system=disk))
            store.add(FERN)
            other.add(FERN)
            with Gate(disk) as gate:
                first = pool.submit(store.add, MOSS)
                gate.wait_for(1)
                repeat = pool.submit(other.add, MOSS)
                if slow or not shared:
                    gate.wait_for(2)
                with pytest.raises(TimeoutError):
                    repeat.result(0.05)
                assert disk.durable == lines(FERN)
                if len(gate.held) > 1:
                    # Any one sync that began after the write is enough.
                    gate.release(gate.held[1])
                    repeat.result(PATIENCE)
                    assert disk.durable == lines(FERN, MOSS)
            repeat.result(PATIENCE)
            first.result(PATIENCE)
        assert path.read_bytes() == disk.durable == lines(FERN, MOSS)

    def test_repeats_in_one_batch_are_written_once(self, path, disk, pool):
        """Of equal plants in one batch one is written, and all are acknowledged."""
        with JSONLinesStore(path, system=disk) as store:
            store.add(FERN)
            with Gate(disk) as gate:
                first = pool.submit(store.add, IVY)
                gate.wait_for(1)
                adds = [pool.submit(store.add, MOSS) for _ in range(4)]
                adds.append(pool.submit(store.add, MOSS._replace(tag='sun')))
            outcomes = [add.exception(PATIENCE) for add in (first, *adds)]
        assert sum(outcome is None for outcome in outcomes) in (2, 5)
        assert all(isinstance(outcome, IdTaken) for outcome in outcomes if outcome)
        assert len(raw_plants(disk.durable)) == 3
        assert path.read_bytes() == disk.durable

    def test_conflict_with_a_plant_that_fails(self, path, disk, pool, monkeypatch):
        """A plant is not refused for a rival in its batch that was never written."""
        # One sync in flight, so that the rivals wait for it together.
        monkeypatch.setattr(group_commit, 'SLOW_SYNC', float('inf'))
        with JSONLinesStore(path, system=disk) as store:
            store.add(FERN)
            with Gate(disk) as gate:
                first = pool.submit(store.add, IVY)
                gate.wait_for(1)
                rivals = [MOSS, MOSS._replace(tag='sun')]
                adds = [pool.submit(store.add, rival) for rival in rivals]
                gate.then = Fault('pwrite', 1, failing(errno.ENOSPC), lasting=True)
            first.result(PATIENCE)
            for add in adds:
                with pytest.raises(StoreUnavailable):
                    add.result(PATIENCE)
