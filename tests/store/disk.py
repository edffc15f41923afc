"""A disk that fails, and that loses unsynced writes: the faults of the file store.

The modules of ``store.jsonl`` call the system by their global ``os``. ``installed``
gives them another object there, for example a ``Disk``. Where one store of several has
a fault, ``another_process`` loads the modules once more, with an ``os`` of their own.
"""

import contextlib
import errno
import importlib
import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
from waiting import PATIENCE, wait_until

import store
from store import IdTaken, Plant, StoreUnavailable
from store.jsonl import JSONLinesStore, record

PACKAGE = 'store.jsonl'


@contextlib.contextmanager
def installed(system):
    """Give the file store other system calls than those of ``os``; yield them."""
    with contextlib.ExitStack() as stack:
        for module in modules():
            stack.enter_context(mock.patch.object(module, 'os', system))
        yield system


def another_process(system):
    """Return the class of the file store of a process with its own system calls."""
    package = store.jsonl
    ours = {name: sys.modules.pop(name) for name in [*sys.modules] if PACKAGE in name}
    try:
        for module in modules():
            module.os = system
        return store.jsonl.JSONLinesStore
    finally:
        sys.modules.update(ours)
        store.jsonl = package


def modules():
    """Return the modules of the file store that use ``os``; import them."""
    importlib.import_module(f'{PACKAGE}.repair')
    found = (module for name, module in sys.modules.items() if PACKAGE in name)
    return [module for module in found if hasattr(module, 'os')]


class Killed(BaseException):
    """The process is killed here; as a BaseException it passes every handler."""

    def __init__(self, written=0):
        super().__init__()
        self.written = written  # bytes of a write, before


class Disk:
    """System calls on a disk that can fail, and that loses unsynced writes.

    A write to the plant file is durable when a sync that began after it has succeeded.
    What a failed sync covers is lost, though it can still be read: a later sync does
    not write it. As on Linux, each descriptor that was open reports the failure once.

    ``before`` is called before each call, with its name and its arguments. It may block
    or raise; after a ``Killed`` every call raises it. A number limits a pwrite.
    """

    def __init__(self, path):
        self.plants = path
        self.durable = b''  # the content of the plant file on the disk
        self.named = False  # whether the file's directory entry is on the disk
        self.calls = []  # what ``before`` was called with
        self.before = no_fault
        self._changes = []  # offset and bytes of each write, None for a truncation
        self._settled = 0  # the changes before this index are durable, or lost
        self._failures = 0
        self._reported = {}  # from each descriptor to the failures reported on it
        self._lock = threading.Lock()
        self._killed = False

    def __getattr__(self, name):
        function = getattr(os, name)

        def call(*arguments):
            self._enter(name, *arguments)
            return function(*arguments)

        return call if name in ('pread', 'unlink') else function

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
        if self._is_plant_file(fd):
            self._changes.append((size, None))

    def fdatasync(self, fd):
        self._sync('fdatasync', fd)

    def fsync(self, fd):
        self._sync('fsync', fd)

    def calls_on(self, path):
        """Return the changes and syncs of a file so far; forget all calls."""
        calls, self.calls = self.calls, []
        changes = (call for call in calls if call[0] not in ('open', 'pread'))
        return [name for name, target, *_ in changes if path_of(target) == str(path)]

    def restart(self, content):
        """Continue after a power cut that left this content of the file."""
        self.plants.write_bytes(content)
        self.durable = content
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
            return os.path.samestat(os.fstat(fd), os.stat(self.plants))

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
        # The real one too: a recorder may wait for it.
        getattr(os, name)(fd)
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


def path_of(target):
    """Return the path of a descriptor, or a path as text."""
    if isinstance(target, int):
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(f'/proc/self/fd/{target}')
    return str(target)


def open_paths():
    """Return the paths of the descriptors of this process."""
    return [path_of(int(fd)) for fd in os.listdir('/proc/self/fd')]


def no_fault(name, *arguments):
    """Let every call succeed."""


def failure(number):
    """Return the error that a failing system call raises."""
    return OSError(number, os.strerror(number))


@dataclass
class Fault:
    """Makes the n-th call of one function fail, or all from the n-th on."""

    call: str  # the name of the function
    nth: int  # the number of the call, from 1
    effect: Callable  # called with the call's arguments; it raises, or returns a limit
    lasting: bool = False  # whether the calls after it fail too
    count: int = 0

    @property
    def reached(self):
        return self.count >= self.nth

    def __call__(self, name, *arguments):
        if name != self.call:
            return None
        self.count += 1
        due = self.reached if self.lasting else self.count == self.nth
        return self.effect(*arguments) if due else None


def failing(number):
    """Return an effect: the call fails with an error number."""

    def effect(*arguments):
        raise failure(number)

    return effect


class Gate:
    """Blocks its callers until it is open."""

    def __init__(self):
        self.held = 0  # how many callers have come
        self._opened = threading.Event()

    def __call__(self, *arguments):
        self.held += 1
        assert self._opened.wait(PATIENCE)

    def open(self):
        self._opened.set()

    def wait_for(self, count=1):
        """Wait until so many callers have come."""
        wait_until(lambda: self.held >= count, f'{count} callers are at the gate')


@contextlib.contextmanager
def blocked_syncs(disk):
    """Block each fdatasync of a disk; yield the gate."""
    gate = Gate()
    disk.before = lambda name, *arguments: gate() if name == 'fdatasync' else None
    try:
        yield gate
    finally:
        disk.before = no_fault
        gate.open()


# ---- what tests of the file store read and write without it


def files(path):
    """Return the files in the directory of the plant file: content by name."""
    return {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}


def take_side_files(path):
    """Return what side files hold, and remove them."""
    kept = []
    for side in sorted(path.parent.glob(f'{path.name}.*-[0-9]*')):
        kept.append(side.read_bytes())
        side.unlink()
    return kept


def append(path, data):
    """Append to a file, as another process that is killed after the write."""
    with path.open('ab') as file:
        file.write(data)


def lines(*plants):
    """Return the records of plants."""
    return b''.join(map(record.encode, plants))


def raw_plants(content):
    """Return the plants of a sound file, read without the store's code."""
    assert not content or content.endswith(b'\n')
    return [Plant(**json.loads(line)) for line in content.split(b'\n') if line.strip()]


def fill(path, *plants):
    """Add plants to a plant file by a store, and close it."""
    with JSONLinesStore(path) as opened:
        opened.add_many(plants)


def try_add(store, plant, times=1):
    """Add a plant with retries, as a client does; return whether it was stored."""
    for _ in range(times):
        with contextlib.suppress(StoreUnavailable):
            store.add(plant)
            return True
    return False


def assert_raise(error, *uses, match=None):
    """Check that each of some calls raises an error."""
    for use in uses:
        with pytest.raises(error, match=match):
            use()


def assert_stored(store, plants, free=()):
    """Check that a store, or a file, has these plants, and that other ids are free."""
    if isinstance(store, os.PathLike):
        with JSONLinesStore(store) as opened:
            assert_stored(opened, plants, free)
        return
    store.ping()  # which may mend the end of the file
    before = store.path.read_bytes()
    others = [plant._replace(name='Another') for plant in plants]
    outcomes = store.add_many([*plants, *others])  # each id is looked up once
    assert outcomes[: len(plants)] == [False] * len(plants)
    assert all(isinstance(other, IdTaken) for other in outcomes[len(plants) :])
    assert store.path.read_bytes() == before
    added = [Plant(id, 'Free') for id in free]
    assert store.add_many(added) == [True] * len(added)
    assert store.path.read_bytes() == before + lines(*added)
