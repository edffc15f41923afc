"""A disk that fails, and that loses what is not synced: the faults of the file store.

``installed`` gives the modules of the store a ``Disk`` in place of ``os``, and of each
function of it that they have imported.

What is modelled
    A disk with a cache writes blocks of 512 or 4,096 bytes, each at once, in any order.
    So after a crash, if a file was last synced at some moment,

    * each block of it is as it was then, or as at any moment since; a block behind the
      end that it had then may be NULs;
    * the file is as long as it was at one of these moments, or a whole number of blocks
      between two of them: a file system may make a file longer before it writes;
    * each change to the directory since *its* last sync is lost or not: a new file or a
      removal. A sync of a file does not cover its name.

    A sync covers what was written before it began, and counts from when it has ended.
    What a failed sync covers is lost, though it can still be read: a later sync does
    not write it. As on Linux, each descriptor that was open reports the failure once.

Left out are blocks that a disk writes in part, or returns with flipped bits.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import stat
import sys
import threading
from functools import partialmethod
from pathlib import Path
from unittest import mock

import pytest
from waiting import PATIENCE, wait_until

from store import IdTaken, Plant
from store.jsonl import JSONLinesStore, record


@contextlib.contextmanager
def installed(disk):
    """Give the store the system calls of a disk; yield it."""
    calls = {id(call): name for name, call in vars(os).items() if callable(call)}
    with contextlib.ExitStack() as stack:
        for name in [*filter(re.compile(r'store(\.|$)').match, sys.modules)]:
            for known, value in [*vars(sys.modules[name]).items()]:
                ours = getattr(disk, calls.get(id(value), ''), value is os and disk)
                if ours:
                    stack.enter_context(mock.patch(f'{name}.{known}', ours))
        yield disk


class File:
    """What a file holds after each change, as a disk has it that writes all of it."""

    def __init__(self, name, moment, content):
        self.name = name
        self.versions = [(moment, content)]
        # For each sync the moment of its end, and the number of the version it covers.
        self.synced = [(moment, 0)]
        self.failures = 0  # of syncs

    def change(self, moment, offset, data=None):
        """Note a write, or without data that the file now ends at the offset."""
        content = self.versions[-1][1]
        after = b'' if data is None else content[offset + len(data) :]
        content = content[:offset].ljust(offset, b'\0') + (data or b'') + after
        self.versions.append((moment, content))

    def possible(self, moment=sys.maxsize):
        """Return the contents of which a crash may leave parts, the newest first."""
        until = [content for at, content in self.versions if at <= moment]
        return until[max(at for ended, at in self.synced if ended <= moment) :][::-1]


class Disk:
    """The system calls of the file store, on the directory of a plant file.

    ``before`` is called before each call, with its name and its arguments. It may block
    or raise. A number limits a pwrite.
    """

    def __init__(self, path):
        self.plants = path
        self.before = no_fault
        self.calls = ['begin']  # that changed something; the moments are its indexes
        self.names = []  # a moment, a name, and its file from then on, if any
        self.names_synced = []  # for each sync its end, and how many names it covers
        self._files = {}  # by inode
        self._reported = {}  # from a descriptor to the failures reported on it
        self._lock = threading.RLock()
        for entry in filter(os.DirEntry.is_file, os.scandir(path.parent)):
            self._enter_file(entry.name, entry.inode(), Path(entry).read_bytes())
        self.names_synced.append((0, len(self.names)))

    def __getattr__(self, name):
        return getattr(os, name)

    def _look(self, name, *arguments):
        self.before(name, *arguments)
        return getattr(os, name)(*arguments)

    pread = partialmethod(_look, 'pread')
    fstat = partialmethod(_look, 'fstat')

    def open(self, path, flags, mode=0o777):
        self.before('open', path, flags)
        with self._lock:
            is_new = flags & os.O_CREAT and not os.path.exists(path)
            fd = os.open(path, flags, mode)
            inode, (directory, name) = os.fstat(fd).st_ino, os.path.split(path)
            if inode not in self._files and directory == str(self.plants.parent):
                if is_new:
                    self.calls.append(f'open {name}')
                self._enter_file(name, inode, Path(path).read_bytes())
                if not is_new:  # somebody else has made it
                    self.names_synced.append((self.now, len(self.names)))
            if file := self._file(fd):
                self._reported[fd] = file.failures
        return fd

    def pwrite(self, fd, data, offset):
        data = data[: self.before('pwrite', fd, data, offset)]
        with self._lock:
            count = os.pwrite(fd, data, offset)
            if file := self._file(fd):
                self.calls.append(f'pwrite {file.name}')
                file.change(self.now, offset, data)
            return count

    def ftruncate(self, fd, size):
        self.before('ftruncate', fd, size)
        with self._lock:
            os.ftruncate(fd, size)
            file = self._file(fd)
            self.calls.append(f'ftruncate {file.name}')
            file.change(self.now, size)

    def unlink(self, path):
        self.before('unlink', path)
        with self._lock:
            self._files.pop(os.stat(path).st_ino, None)
            os.unlink(path)
            self.calls.append(f'unlink {path}')
            self.names.append((self.now, os.path.basename(path), None))

    @property
    def now(self):
        """The last moment."""
        return len(self.calls) - 1

    @property
    def durable(self):
        """What a power cut leaves of the plant file that loses most."""
        return self._file(self.plants).possible()[-1]

    def calls_since(self, moment):
        """Return the changes and syncs of the plant file after a moment."""
        calls = self.calls[moment + 1 :]
        return [it.split()[0] for it in calls if it.endswith(f' {self.plants.name}')]

    def resume(self):
        """Continue with the disk as it is, without further faults."""
        self.before = no_fault

    def _enter_file(self, name, inode, content):
        self._files[inode] = File(name, self.now, content)
        self.names.append((self.now, name, self._files[inode]))

    def _file(self, target):
        """Return the file of a descriptor or a path, if it is one of the directory."""
        return self._files.get(os.stat(target).st_ino)

    def _sync(self, name, fd):
        with self._lock:
            file, names = self._file(fd), len(self.names)
            self.calls.append(f'{name} {file.name if file else "the directory"}')
            version = len(file.versions) - 1 if file else 0
        try:
            self.before(name, fd)
            if file and self._reported.get(fd, 0) < file.failures:
                failing(errno.EIO)()
        except OSError:
            if file:
                with self._lock:
                    file.failures += self._reported[fd] == file.failures
                    self._reported[fd] = file.failures
                    # All is lost but a new end: that is not in a page of the file.
                    size = os.fstat(fd).st_size
                    file.versions.append((self.now, file.possible()[-1][:size]))
            raise
        with self._lock:
            self.calls.append('it has ended')
            if file:
                file.synced.append((self.now, version))
            elif stat.S_ISDIR(os.fstat(fd).st_mode):
                self.names_synced.append((self.now, names))

    fdatasync = partialmethod(_sync, 'fdatasync')
    fsync = partialmethod(_sync, 'fsync')


def crash(disk, moment, block, pick):
    """Return what a crash at some moment leaves: content by name.

    ``pick`` chooses from a list of what may be there, the newest first.
    """
    names = {}
    synced = max(count for ended, count in disk.names_synced if ended <= moment)
    for place, (at, name, file) in enumerate(disk.names):
        if at <= moment and (place < synced or pick([True, False])):
            names[name] = file
    left = {}
    for name, file in names.items():
        if file is not None:
            contents = file.possible(moment)
            sizes = dict.fromkeys(map(len, contents))
            offsets = range(0, max(sizes), block)
            sizes |= dict.fromkeys(at for at in offsets if at > min(sizes))
            blocks = []
            for offset in offsets:
                kinds = (content[offset : offset + block] for content in contents)
                kinds = dict.fromkeys(kind.ljust(block, b'\0') for kind in kinds)
                blocks.append(pick([*kinds]))
            left[name] = b''.join(blocks)[: pick([*sizes])]
    return left


def no_fault(*call):
    """Let every call succeed."""


class Fault:
    """Makes the n-th call of one function fail, or all from the n-th on.

    ``effect`` is called with the call's arguments; it raises, or returns a limit.
    """

    def __init__(self, call, nth, effect, lasting=False):  # no name of a call: any
        self._call, self._effect = call, effect
        self._due, self._lasting = itertools.count(1 - nth), lasting
        self.reached = False

    def __call__(self, name, *arguments):
        if self._call in (name, '') and (due := next(self._due)) >= 0:
            self.reached = True
            if due == 0 or self._lasting:
                return self._effect(*arguments)
        return None


def failing(number):
    """Return an effect: the call fails with an error number."""

    def effect(*arguments):
        raise OSError(number, os.strerror(number))

    return effect


def full(room):
    """Return an effect: a write writes so many bytes, and all later ones none."""
    rooms = iter([room] * bool(room))
    return lambda *arguments: next(rooms, 0) or failing(errno.ENOSPC)()


class Gate(threading.Event):
    """Blocks its callers until it is set."""

    held = 0  # how many callers have come

    def __call__(self, *arguments):
        self.held += 1
        assert self.wait(PATIENCE)

    def wait_for(self, count=1):
        """Wait until so many callers have come."""
        wait_until(lambda: self.held >= count, f'{count} callers are at the gate')


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
