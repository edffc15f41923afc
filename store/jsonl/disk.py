"""System calls on a plant file and the files beside it, and what their errors mean.

The lock of a plant file, an ``flock``, excludes descriptors, not processes. A forked
child closes that of its parent (``store/forks.py``), or it would keep the lock of one
that was killed.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from store.errors import StoreUnavailable
from store.forks import fill_standard

log = logging.getLogger(__name__)

CHUNK = 2 * 1024 * 1024  # bytes read at a time
# What a file system says that has no locks or no syncs, for example one of a network.
NOT_SUPPORTED = errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL
LOCK_WITHIN = 4.5  # seconds; an add, which also waits for a batch, has 5
SAID_AFTER = 2.0  # seconds, until a wait is told in the log

Spans = list[tuple[int, int]]  # where each begins and ends
Result = TypeVar('Result')


def open_file(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a plant file, which must be a regular one.

    Samba or a kernel's NFS server may have a lease of it. Then this waits until it is
    given back, or the kernel takes it away: after 45 seconds, see fcntl(2).
    """
    fill_standard()
    # Looked at first: the open of a FIFO would wait for another process.
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError('it is not a regular file')
    return os.open(path, flags, 0o600)


def make_file(path: Path) -> None:
    """Make a plant file if it is missing; the first opening makes its name durable."""
    is_new = not os.path.exists(path)
    try:
        os.close(open_file(path, os.O_RDWR | os.O_CREAT * is_new))
    except FileNotFoundError as ex:
        raise OSError('its directory does not exist') from ex
    if is_new:  # perhaps its disk is not mounted, or the name is wrong
        log.warning('%s: there was no such file: a new, empty one was made', path)


def take_lock(
    path: Path, fd: int, within: float | None = None, operation: int = fcntl.LOCK_EX
) -> None:
    """Take the lock within some seconds, by default ``LOCK_WITHIN``."""
    reason = 'another process or thread holds the lock of the file'
    within = LOCK_WITHIN if within is None else within
    began, said = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError as ex:
            waited = time.monotonic() - began
            if waited >= within:
                raise OSError(reason) from ex
        if waited > SAID_AFTER and not said:
            said = True
            log.warning('%s: waiting: %s', path, reason)
        # NOTE: flock() has no timeout. After a pause that is longer than a share of the
        # time it has waited, it would find the lock taken again and again.
        time.sleep(min(max(0.000_05, waited / 8), 0.01))


def locked(
    path: Path,
    fd: int,
    use: Callable[[], Result],
    within: float | None = None,
    operation: int = fcntl.LOCK_EX,
) -> Result:
    """Take the lock, call, and release it: no error anywhere can keep it."""
    try:
        take_lock(path, fd, within, operation)
        return use()
    finally:
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        except BaseException:  # for want of memory, before the call
            fcntl.flock(fd, fcntl.LOCK_UN)  # or all others would wait
            raise


def write(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes, even if the kernel writes them in pieces."""
    written = 0
    while written < len(data):
        count = os.pwrite(fd, data[written:], offset + written)
        if not count:
            raise OSError(errno.EIO, 'nothing could be written')
        written += count


def sync(fd: int, *, times: bool = False) -> None:
    """Make what was written to a file durable; with ``times``, its times too.

    NOTE: on macOS fsync() leaves the data in the cache of the disk; see its fsync(2).
    """
    if hasattr(fcntl, 'F_FULLFSYNC'):
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError as ex:
            if ex.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
            os.fsync(fd)
    elif times or not hasattr(os, 'fdatasync'):
        os.fsync(fd)
    else:
        os.fdatasync(fd)


def sync_directory(path: Path) -> None:
    """Make a new name in a directory durable: a sync of the file does not cover it."""
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        sync(fd, times=True)
    finally:
        os.close(fd)


def pieces(fd: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes between two offsets of a file, as far as it reaches."""
    while start < end and (data := os.pread(fd, min(CHUNK, end - start), start)):
        yield data
        start += len(data)


def copy_aside(path: Path, fd: int, spans: Spans, kind: str) -> Path:
    """Copy spans of a plant file to a new side file, durably; return its path.

    Its name ends in ``.KIND-1``, or ``-2`` if that exists. An error leaves no file.
    """
    number = 1
    while os.path.lexists(side := path.with_name(f'{path.name}.{kind}-{number}')):
        number += 1
    copy = open_file(side, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        like, size = os.fstat(fd), 0
        # FAT has no modes, and a container may lack the owner: neither stops a repair.
        with suppress(OSError):
            os.fchmod(copy, like.st_mode & 0o666)
            os.fchown(copy, like.st_uid, like.st_gid)
        for start, end in spans:
            for data in pieces(fd, start, end):
                write(copy, data, size)
                size += len(data)
        sync(copy, times=True)
        sync_directory(side)
    except BaseException:
        os.unlink(side)
        raise
    finally:
        os.close(copy)
    return side


@dataclass
class Refusing(AbstractContextManager['Refusing', None]):
    """Refuses, with ``StoreUnavailable``, for an error of a plant file: what it means.

    An ``OSError`` without a number is one of ours, and has words for people. This is a
    class: with ``contextmanager`` a lone add takes 1.1 % more instructions.
    """

    path: Path

    def __exit__(self, _: object, ex: BaseException | None, *rest: object) -> None:
        if not isinstance(ex, OSError):
            return
        path, reason, detail = self.path, ex.strerror or str(ex), ''
        if isinstance(ex, FileNotFoundError):
            reason = 'the file is not there: put it back'
            detail = 'a restart begins a new one, which gives all ids again'
        elif ex.errno in NOT_SUPPORTED:
            reason = f'its file system ({file_system(path)}) has no locks or no syncs: '
            reason += 'use a local one'
        elif isinstance(ex, PermissionError):  # EPERM: of attributes, see chattr(1)
            both = f'{path.parent} {path}'
            detail = f'this process is of user {os.geteuid()}; see: '
            detail += f'ls -ldn {both}; lsattr -d {both}'
        raise StoreUnavailable(reason, store=str(path), detail=detail) from ex


def file_system(path: Path) -> str:
    """Return the type of the file system of a path: ``ext4``, ``nfs4``; see proc(5)."""
    found = {'/': 'of unknown type'}  # also where there is no /proc
    with suppress(OSError), open('/proc/self/mountinfo', errors='replace') as mounts:
        for mount in mounts:
            fields = mount.split()
            found[fields[4].replace(r'\040', ' ')] = fields[fields.index('-') + 1]
    return found[max(found, key=lambda point: (path.is_relative_to(point), len(point)))]
