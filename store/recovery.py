"""Reading a plant file that may be damaged, and telling a torn tail from damage.

A crash can leave two things behind. A *torn tail* is everything from the first line
that is not a record to the end of the file, when no record follows. It was never
acknowledged: a sync covers the whole file, so what was written after bytes that a
crash has lost was not synced either. It is cut off, and kept in a side file.

Anything else that is not a record has records after it, and some of those may have
been acknowledged. No program can know what happened there, so nothing is touched until
somebody asks for it (``repair``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from typing import BinaryIO
from typing import NamedTuple
from typing import NoReturn

from store import record
from store.base import Plant
from store.errors import StoreCorrupt
from store.errors import StoreUnavailable

log = logging.getLogger(__name__)

CHUNK = 4 * 1024 * 1024  # bytes read at a time
PROGRESS_EVERY = 2.0  # seconds between two progress lines in the log


class Line(NamedTuple):
    """A line of a plant file.

    Attributes:
        offset: Where it begins, in bytes from the start of the file.
        text: Its bytes, the line feed included if it has one.
        plant: What it holds, or ``None`` if it is not a record.
        reason: Why it is not a record, or the empty string.
    """

    offset: int
    text: bytes
    plant: Plant | None
    reason: str


class TornTail(Exception):
    """No record follows an offset; what does was never acknowledged."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset
        self.reason = reason


def read_lines(file: BinaryIO, start: int, end: int) -> Iterator[Line]:
    """Yield the lines between two offsets, records and others alike."""
    for base, chunk in _chunks(file, start, end):
        at = 0
        while at < len(chunk):
            stop = chunk.find(b'\n', at) + 1 or len(chunk)
            text = chunk[at:stop]
            try:
                yield Line(base + at, text, record.decode(text), '')
            except record.DamagedRecord as ex:
                yield Line(base + at, text, None, str(ex))
            at = stop


def read_plants(path: Path) -> Iterator[Plant]:
    """Yield the plants of a file, which may be in use; nothing is changed.

    Raises:
        StoreUnavailable: The file cannot be read.
        StoreCorrupt: A line is damaged, and records follow it.
    """
    try:
        with path.open('rb') as file:
            yield from _read_plants(path, file, 0)
    except TornTail as ex:
        log.warning('%s: a torn tail at byte %d is left out', path, ex.offset)
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex


def _read_plants(path: Path, file: BinaryIO, start: int) -> Iterator[Plant]:
    end = whole_size(file)
    for line in read_lines(file, start, end):
        if line.plant is None:
            damage = _damage(path, file, line.offset, whole_size(file))
            if damage is not None and damage.offset == line.offset:
                raise damage
            # Whoever uses the file has cut a torn tail off meanwhile, and goes on.
            yield from _read_plants(path, file, line.offset)
            return
        yield line.plant


def expected_records(fd: int) -> int:
    """Return about how many records a file has, from its size and its beginning."""
    sample = os.pread(fd, CHUNK, 0)
    return os.fstat(fd).st_size * sample.count(b'\n') // max(1, len(sample))


def scan_ids(
    path: Path, file: BinaryIO, start: int, end: int
) -> Iterator[tuple[int, int]]:
    """Yield the id and the offset of each record; progress goes to the log.

    Args:
        path: For messages.
        file: The plant file.
        start: Where a record begins, in bytes.
        end: Where to stop, in bytes.

    Raises:
        TornTail: There is one, at the end.
        StoreCorrupt: A line is damaged, and records follow it.
    """
    began = reported = time.monotonic()
    for base, chunk in _chunks(file, start, end):
        size = chunk.rfind(b'\n') + 1
        try:
            for id, at in record.scan_ids(chunk[:size]):
                yield id, base + at
        except record.DamagedRecord:
            _raise_damage(path, file, base, end)
        if size < len(chunk):
            _raise_damage(path, file, base + size, end)
        now = time.monotonic()
        if now - reported > PROGRESS_EVERY:
            reported = now
            log.info(
                '%s: %d %% of %d MiB read, %d s',
                path,
                100 * (base + size - start) // (end - start),
                (end - start) >> 20,
                now - began,
            )


def cut_tail(path: Path, fd: int, offset: int, system: Any = os) -> Path:
    """Cut a torn tail off a file, after keeping it in a side file.

    REQUIRES: the lock of the plant file, or that nobody else uses it.

    Args:
        path: Of the plant file.
        fd: Of the plant file, open for reading and writing.
        offset: Where the torn tail begins.
        system: The system calls.

    Returns:
        Where the tail is kept.

    Raises:
        OSError: Something failed; if the cut was not made, nothing is lost.
    """
    end = os.fstat(fd).st_size
    side = side_file(path, 'torn')
    kept = system.open(side, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        position = offset
        while position < end and (data := os.pread(fd, CHUNK, position)):
            position += os.write(kept, data)
        system.fsync(kept)
        sync_directory(path, system)
        # The point of no return: the bytes exist twice, durably; now once. A crash may
        # bring them back, to be cut again, until the next sync of the file.
        system.ftruncate(fd, offset)
    except BaseException:
        side.unlink()
        raise
    finally:
        os.close(kept)
    return side


def whole_size(file: BinaryIO) -> int:
    """Return the size of a plant file between two appends, not in the middle of one.

    It takes the lock for a moment; the caller must not have it.
    """
    fcntl.flock(file, fcntl.LOCK_SH)
    try:
        return os.fstat(file.fileno()).st_size
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def side_file(path: Path, kind: str) -> Path:
    """Return a name beside a plant file that no file has: ``plants.jsonl.torn-1``."""
    number = 1
    while (side := path.with_name(f'{path.name}.{kind}-{number}')).exists():
        number += 1
    return side


def sync_directory(path: Path, system: Any = os) -> None:
    """Make a new name durable: a file's own sync does not cover it."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system.fsync(fd)
    finally:
        os.close(fd)


def line_number(file: BinaryIO, offset: int) -> int:
    """Return the number, counted from 1, of the line that begins at an offset."""
    return 1 + count_lines(file, 0, offset)


def count_lines(file: BinaryIO, start: int, end: int) -> int:
    """Return how many lines end between two offsets."""
    return sum(chunk.count(b'\n') for _, chunk in _chunks(file, start, end))


def _chunks(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield a file in pieces of whole lines, each with its offset.

    Only the last piece may end without a line feed.
    """
    offset = start
    carried = b''
    file.seek(start)
    while start < end and (data := file.read(min(CHUNK, end - start))):
        start += len(data)
        whole, feed, rest = data.rpartition(b'\n')
        if feed:
            piece = carried + whole + feed
            yield offset, piece
            # The consumer may have moved the file's position, to look elsewhere.
            file.seek(start)
            offset += len(piece)
            carried = rest
        else:
            carried += rest
    if carried:
        yield offset, carried


def _damage(
    path: Path, file: BinaryIO, start: int, end: int
) -> StoreCorrupt | TornTail | None:
    """Return what the damage is that lies at or after an offset, if there still is."""
    lines = read_lines(file, start, end)
    damaged = next((line for line in lines if line.plant is None), None)
    if damaged is None:
        return None
    if any(line.plant is not None for line in lines):
        number = line_number(file, damaged.offset)
        return StoreCorrupt(str(path), number, damaged.offset, damaged.reason)
    return TornTail(damaged.offset, damaged.reason)


def _raise_damage(path: Path, file: BinaryIO, start: int, end: int) -> NoReturn:
    # Under the lock only somebody who does not know of it can have changed it back.
    changed = StoreUnavailable('somebody else changes the file', store=str(path))
    raise _damage(path, file, start, end) or changed
