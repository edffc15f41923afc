"""Reading a plant file that may be damaged, and telling a torn tail from damage.

A crash can leave two things, both behind the end that the latest sync covered. A sync
covers the whole file. So if a crash has lost some bytes, all bytes that were written
after them were not synced either, and never acknowledged:

* a *torn tail*: everything from the first line that is not a record to the end of the
  file, when no record follows;
* a *lost block*: zeros up to the end of a block of the disk, where a later block of the
  same unsynced batch did reach the disk, so that records follow. It is believed only
  when a store opens, and only above an end that is known to have been synced.

Both are cut off, and kept in a side file. The last line may also be a record that lacks
its line feed, because an editor has left it out: it is kept. (The beginning of a record
is never a JSON object.)

Any other line that is not a record was acknowledged, or may have been. No program can
know what happened to it. So nothing is changed until an operator asks for a repair. Nor
is a file changed that no crash of ours can have left: where no line is a record, or
where more is damaged than can have been written between two syncs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from store.base import Plant
from store.errors import StoreCorrupt, StoreUnavailable
from store.jsonl import record
from store.jsonl.disk import CHUNK, copy_aside, open_file
from store.jsonl.index import Index
from store.jsonl.lock import take_flock
from store.jsonl.synced import UNKNOWN, read_synced
from store.jsonl.table import IndexDamaged

log = logging.getLogger(__name__)

BLOCK = 512  # bytes; the smallest that a disk loses
# The longest torn tail, in bytes. A batch has 1 MiB, four may wait for a sync, and
# several processes may write.
MOST_TORN = 64 * 1024 * 1024
PROGRESS_EVERY = 2.0  # seconds between two progress lines in the log

# The beginning of each line that we write.
BEGINNING = b'{"id":'
FIRST_MEMBER = re.compile(rb'\{"id":-?[0-9]{0,19}(,|$)')


class Line(NamedTuple):
    """A line of a plant file."""

    offset: int  # in bytes from the start of the file
    text: bytes  # the line feed included if it has one
    plant: Plant | None  # None if it is not a record
    reason: str  # why it is not a record


class TornTail(Exception):
    """The bytes from an offset on are a torn tail: they were never acknowledged."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset
        self.reason = reason


def read_lines(fd: int, start: int, end: int) -> Iterator[Line]:
    """Yield the lines between two offsets, records and others alike."""
    for base, chunk in _chunks(fd, start, end):
        at = 0
        while at < len(chunk):
            stop = chunk.find(b'\n', at) + 1 or len(chunk)
            text = chunk[at:stop]
            try:
                yield Line(base + at, text, record.decode(_ended(text)), '')
            except record.DamagedRecord as ex:
                yield Line(base + at, text, None, str(ex))
            at = stop


def read_plants(path: Path) -> Iterator[Plant]:
    """Yield the plants of a file, which may be in use; nothing is changed.

    Raises:
        StoreUnavailable: The file cannot be read.
        StoreCorrupt: A line is damaged, and it is not a torn tail.
    """
    try:
        fd = open_file(path, os.O_RDONLY)
        try:
            synced = known_end(path, fd)
            check_length(path, fd, whole_size(path, fd), synced)
            yield from _read_plants(path, fd, 0, synced)
        finally:
            os.close(fd)
    except TornTail as ex:
        log.warning('%s: a torn tail at byte %d is left out', path, ex.offset)
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex


def _read_plants(path: Path, fd: int, start: int, synced: int) -> Iterator[Plant]:
    end = whole_size(path, fd)
    for line in read_lines(fd, start, end):
        if line.plant is None:
            damage = _damage(path, fd, line.offset, whole_size(path, fd), synced, False)
            if damage is not None and damage.offset == line.offset:
                raise damage
            # Another process has cut off a torn tail, and may have appended.
            yield from _read_plants(path, fd, line.offset, synced)
            return
        yield line.plant


def read_line(fd: int, offset: int) -> bytes:
    """Return the line that begins at an offset; its line feed may be added."""
    line = b''
    while not line.endswith(b'\n'):
        piece = os.pread(fd, 512 + 15 * len(line), offset + len(line))
        line += piece[: piece.find(b'\n') + 1] or piece
        if not piece:
            break
    return _ended(line)


def scan_ids(
    path: Path, fd: int, start: int, end: int, synced: int, *, crashed: bool
) -> Iterator[tuple[int, int]]:
    """Yield the id and the offset of each record; progress goes to the log.

    Bytes before ``synced`` are known to have been synced, unless it is ``UNKNOWN``. If
    the machine may have ``crashed`` since that sync, there may be lost blocks.

    Raises:
        TornTail: The file ends in a torn tail.
        StoreCorrupt: A line is damaged, and it is not a torn tail.
    """
    began = reported = time.monotonic()
    for base, chunk in _chunks(fd, start, end):
        try:
            yield from record.scan_ids(_ended(chunk), base)
        except record.DamagedRecord as ex:
            damage = _damage(path, fd, base, end, synced, crashed)
            # Damage that is gone: only a program that ignores the lock can have
            # removed it.
            reason = 'another program changes the file'
            raise damage or StoreUnavailable(reason, store=str(path)) from ex
        now = time.monotonic()
        if now - reported > PROGRESS_EVERY:
            reported = now
            log.info(
                '%s: %d %% of %d MiB read, %d s',
                path,
                100 * (base + len(chunk) - start) // (end - start),
                (end - start) >> 20,
                now - began,
            )


def cut_tail(path: Path, fd: int, offset: int) -> Path:
    """Move the bytes of a plant file from an offset on to a side file; return its path.

    REQUIRES: the lock of the plant file.

    Raises:
        OSError: A system call failed. The bytes are in the plant file or the side file.
    """
    end = os.fstat(fd).st_size
    side = copy_aside(path, fd, [(offset, end)], 'torn')
    try:
        # The point of no return: the bytes are durable in both files; the cut leaves
        # one. Until the file is synced, a crash may bring them back, to be cut again.
        # The sync must come before the next append: a crash could leave blocks of both,
        # and the beginning of a new record with the end of an old one may be a record
        # that no client sent.
        os.ftruncate(fd, offset)
        os.fdatasync(fd)
    except BaseException:
        # An interrupt may come after the cut: then the side file is the only copy.
        if os.fstat(fd).st_size == end:
            os.unlink(side)
        raise
    return side


def whole_size(path: Path, fd: int) -> int:
    """Return the size of a plant file between two appends, not in the middle of one.

    REQUIRES: the caller does not hold the lock, which is taken for a moment.
    """
    take_flock(path, fd, fcntl.LOCK_SH)
    try:
        return os.fstat(fd).st_size
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def known_end(path: Path, fd: int) -> int:
    """Return an end of a plant file that is known to be synced, or ``UNKNOWN``."""
    with closing(Index(path, fd)) as index:
        return max(index.synced, read_synced(path, fd))


def check_length(path: Path, fd: int, size: int, known: int) -> None:
    """Refuse a plant file that is shorter than an end that it has had.

    Raises:
        StoreUnavailable: It is; the message says what an operator can do.
    """
    missing = known - size
    if missing <= 0 or (missing == 1 and _lacks_line_feed(fd, size)):
        return
    raise StoreUnavailable(
        cut_short(missing),
        store=str(path),
        detail='plants were acknowledged in them: put the whole file back; or accept '
        f'the loss: python -m store check --repair jsonl:{path}, then reload the '
        'server',
    )


def cut_short(missing: int) -> str:
    """Return what is wrong with a file that lacks bytes which were synced."""
    return f'the file was cut short: {missing} bytes at its end are missing'


def _lacks_line_feed(fd: int, size: int) -> bool:
    """Whether the last line is a record but for its line feed."""
    start = size
    while start and os.pread(fd, 1, start - 1) != b'\n':
        start -= 1
    lines = list(read_lines(fd, start, size))
    return len(lines) == 1 and lines[0].plant is not None


def read_plant(path: Path, fd: int, offset: int) -> Plant:
    """Return the plant at an offset.

    Raises:
        StoreCorrupt: There is no record.
    """
    try:
        return record.decode(read_line(fd, offset))
    except record.DamagedRecord as ex:
        raise corrupt(path, fd, offset, str(ex)) from ex


def check_repeat(path: Path, fd: int, first: int, again: int) -> None:
    """Accept a plant that is in the file twice, but not two plants with one id.

    Raises:
        IndexDamaged: The lines do not have the same id.
        StoreCorrupt: They are different plants.
    """
    plant = read_plant(path, fd, first)
    other = read_plant(path, fd, again)
    if plant.id != other.id:
        raise IndexDamaged('an entry is not of this file')
    if plant != other:
        raise corrupt(path, fd, again, repeated(plant.id))


def repeated(id: int) -> str:
    """Return what is wrong with a line whose id an earlier line has."""
    return f'its id is that of a different plant, {id}'


def corrupt(path: Path, fd: int, offset: int, reason: str) -> StoreCorrupt:
    """Return the exception for a damaged line that begins at an offset."""
    return StoreCorrupt(str(path), 1 + count_lines(fd, 0, offset), offset, reason)


def count_lines(fd: int, start: int, end: int) -> int:
    """Return how many lines end between two offsets."""
    return sum(chunk.count(b'\n') for _, chunk in _chunks(fd, start, end))


def _chunks(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield a file in chunks of whole lines, each with its offset.

    Only the last chunk may end without a line feed.
    """
    offset = start
    pieces: list[bytes] = []  # of a line; joined once, however long it is
    while start < end and (data := os.pread(fd, min(CHUNK, end - start), start)):
        start += len(data)
        cut = data.rfind(b'\n') + 1
        if cut:
            whole = b''.join((*pieces, data[:cut]))
            pieces.clear()
            yield offset, whole
            offset += len(whole)
        pieces.append(data[cut:])
    if any(pieces):
        yield offset, b''.join(pieces)


def _damage(
    path: Path, fd: int, start: int, end: int, synced: int, crashed: bool
) -> StoreCorrupt | TornTail | None:
    """Return the first damage at or after an offset, or ``None`` if it is gone."""
    lines = read_lines(fd, start, end)
    damaged = next((line for line in lines if line.plant is None), None)
    if damaged is None:
        return None
    reason = damaged.reason
    if damaged.offset < synced:
        reason = f'{reason}, and it was acknowledged'
    elif (crashed and synced != UNKNOWN and _is_lost_block(damaged)) or all(
        line.plant is None for line in lines
    ):
        if damaged.offset == 0 and not _is_ours(damaged.text):
            raise StoreUnavailable(
                'it is not a file of plants: no line of it is a plant', store=str(path)
            )
        if end - damaged.offset <= MOST_TORN:
            return TornTail(damaged.offset, reason)
        reason = f'{reason}, and more follows than an unfinished write can leave'
    return corrupt(path, fd, damaged.offset, reason)


def _is_ours(text: bytes) -> bool:
    """Whether the first line of a file can be what a crash left of its first write."""
    whole, zeros, _ = text.partition(b'\0')
    return bool(zeros or not text.endswith(b'\n')) and (
        BEGINNING.startswith(whole) or FIRST_MEMBER.match(whole) is not None
    )


def _ended(text: bytes) -> bytes:
    """Return lines with the line feed that the last one may lack."""
    return text if text.endswith(b'\n') else text + b'\n'


def _is_lost_block(line: Line) -> bool:
    """Whether a line has zeros up to the end of a block."""
    zeros = line.text.find(b'\0')
    if zeros < 0:
        return False
    rest = line.text[zeros:].lstrip(b'\0')
    return (line.offset + len(line.text) - len(rest)) % BLOCK == 0
