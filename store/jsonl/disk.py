"""System calls on a plant file and the files beside it, and what their errors mean."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from store.base import Create
from store.errors import StoreUnavailable
from store.jsonl.table import IndexDamaged, check_made_by_us

CHUNK = 2 * 1024 * 1024  # bytes read at a time
NO_FULL_SYNC = errno.ENOTSUP, errno.EINVAL, errno.ENOTTY  # of file systems on macOS


def open_file(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a plant file; raise ``StoreUnavailable`` if it is no regular file."""
    if path.is_dir():
        raise StoreUnavailable('it is a directory, not a file', store=str(path))
    # NOTE: without O_NONBLOCK the open of a FIFO would wait for another process.
    fd = os.open(path, flags | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreUnavailable('it is not a regular file', store=str(path))
    return fd


def open_or_make(path: Path, create: Create) -> int:
    """Open a plant file, or make it. If it must not be made, say what to do."""
    with suppress(FileNotFoundError):
        return open_file(path)
    index = index_path(path)
    if create == 'never' or (create == 'first' and index.exists()):
        way = 'reload the server' if create == 'never' else f'remove {index.name}'
        reason = f'the file is gone: put it back, or {way} to start with an empty one'
        raise StoreUnavailable(reason, store=str(path))
    try:
        # NOTE: index first. The new file may get the inode number of the old one, and a
        # process that dies in between must not leave an index that seems to fit it.
        remove_index(path)
        return open_file(path, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError as ex:
        raise StoreUnavailable('its directory does not exist', store=str(path)) from ex


def new_file(path: Path, plants: int) -> int:
    """Make a file with the mode and the owner of the plant file, ``plants``."""
    like = os.fstat(plants)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(PermissionError):  # only root may give a file away
        os.fchown(fd, like.st_uid, like.st_gid)
    os.fchmod(fd, like.st_mode & 0o666)
    return fd


def open_lock_file(path: Path, plants: int) -> IO[bytes]:
    """Open the file of the flush lock of a plant file; make it if it is missing."""
    lock_path = index_path(path, '-lock')
    with suppress(FileExistsError):
        os.close(new_file(lock_path, plants))
    check_made_by_us(lock_path)
    fd = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    return open(fd, 'r+b', buffering=0)


def try_write(path: Path, plants: int, length: int, offset: int) -> None:
    """Write to the file of the flush lock, as an append would, and empty it again.

    No reader of the plant file must see these bytes. The kernel reserves the room at
    once, and knows quotas, limits, and a disk that is read-only: no sync is needed.
    """
    with open_lock_file(path, plants) as file:
        fd = file.fileno()
        os.ftruncate(fd, 0)  # what a killed process has left
        try:
            write(fd, bytes(length), offset)
        finally:
            os.ftruncate(fd, 0)


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
            if ex.errno not in NO_FULL_SYNC:
                raise
            os.fsync(fd)
    elif times or not hasattr(os, 'fdatasync'):
        os.fsync(fd)
    else:
        os.fdatasync(fd)


def pieces(fd: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes between two offsets of a file, as far as it reaches."""
    while start < end and (data := os.pread(fd, min(CHUNK, end - start), start)):
        yield data
        start += len(data)


def sync_directory(path: Path) -> None:
    """Make a new name in a directory durable: a sync of the file does not cover it."""
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        sync(fd, times=True)
    finally:
        os.close(fd)


def copy_aside(
    path: Path, fd: int, spans: Iterable[tuple[int, int]], kind: str
) -> Path:
    """Copy spans of a plant file to a new side file, durably; return its path.

    Its name ends in ``.KIND-1``, or ``-2`` if that exists. An error leaves no file.
    """
    number = 1
    while os.path.lexists(side := path.with_name(f'{path.name}.{kind}-{number}')):
        number += 1
    copy = new_file(side, fd)
    size = 0
    try:
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


def index_path(path: Path, suffix: str = '') -> Path:
    """Return the path of the index of a plant file, or of a file beside the index."""
    return path.with_name(f'{path.name}.index{suffix}')


def remove(path: Path) -> None:
    """Remove a file beside a plant file, if it is there."""
    check_made_by_us(path)
    path.unlink(missing_ok=True)


def remove_index(path: Path) -> None:
    """Remove the table of a plant file, durably."""
    # NOTE: the table last. SQLite would apply a -wal or -journal to the next table.
    for suffix in '-wal', '-journal', '-shm', '':
        remove(index_path(path, suffix))
    sync_directory(path)


@contextmanager
def unavailable(path: Path) -> Iterator[None]:
    """Raise ``StoreUnavailable`` for an error of a plant file or its index."""
    try:
        yield
    except FileNotFoundError as ex:
        raise StoreUnavailable('the file is gone', store=str(path)) from ex
    except PermissionError as ex:
        raise StoreUnavailable.refused(ex, path, _owner(path)) from ex
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex
    except IndexDamaged as ex:  # even after it was built again
        raise StoreUnavailable(f'the index: {ex}', store=str(path)) from ex


def _owner(path: Path) -> str:
    """Describe the owner of a file, or of its directory, and our own user."""
    for place in path, path.parent:
        with suppress(OSError):
            status = place.stat()
            return (
                f'{place} has mode {status.st_mode & 0o777:o} and belongs to user '
                f'{status.st_uid}; this process is of user {os.geteuid()}'
            )
    return ''
