"""Reading a plant file that may be damaged, and telling a torn tail from damage.

A sync covers the whole file. So if a crash has lost some bytes, all bytes that were
written after them were not synced either, and never acknowledged. It can leave two
things, both after the end that the latest sync covered:

* a *torn tail*: everything from the first line that is not a record to the end of the
  file, when no record follows;
* a *lost block*: zeros up to the end of a block of the disk, where a later block of the
  same unsynced batch did reach the disk, so that records follow. It is believed only
  when a store opens, and only above an end that is known to have been synced.

Both are cut off, and kept in a side file. A last record that lacks only its line feed,
as editors leave it, is kept: the beginning of a record is never a JSON object.

Any other line that is not a record was acknowledged, or may have been. So nothing is
changed until an operator asks for a repair. Nor is a file changed that no crash of ours
can have left: where no line is a record, or where more is damaged than can have been
written between two syncs.
"""

import fcntl
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from store.base import Plant
from store.errors import StoreCorrupt, StoreUnavailable
from store.jsonl import record
from store.jsonl.disk import CHUNK, copy_aside, open_file, pieces
from store.jsonl.index import UNKNOWN, Index
from store.jsonl.lock import take_flock
from store.jsonl.table import IndexDamaged

log = logging.getLogger(__name__)

BLOCK = 512  # bytes; the smallest that a disk loses
# Bytes of a torn tail: a batch has 1 MiB, four may wait for a sync, in each process.
MOST_TORN = 64 * 1024 * 1024
LEARNED = 8 * CHUNK  # bytes whose ids an index learns at a time
PROGRESS_EVERY = 2.0  # seconds between two progress lines in the log
REPEATED = 'its id is that of a different plant, %d'
BEGINNING = b'{"id":'  # of each line that we write
CONTROL = re.compile(rb'[\x01-\x09\x0b-\x1f]')  # in no line that we write


class Line(NamedTuple):
    """A line of a plant file."""

    offset: int  # in bytes from the start of the file
    text: bytes  # the line feed included if it has one
    plant: Plant | None  # None if it is damaged
    reason: str  # why it is damaged


def read_lines(fd: int, start: int, end: int) -> Iterator[Line]:
    """Yield the lines between two offsets, records and others alike."""
    for offset, chunk in _chunks(fd, start, end):
        for text in BytesIO(chunk):
            yield _line(offset, text)
            offset += len(text)


def line_at(fd: int, offset: int) -> Line:
    """Return the line that begins at an offset."""
    text = piece = os.pread(fd, 512, offset)
    while piece and b'\n' not in piece:
        piece = os.pread(fd, 15 * len(text), offset + len(text))
        text += piece
    return _line(offset, text[: text.find(b'\n') + 1] or text)


def plant_at(fd: int, offset: int, id: int) -> Plant:
    """Return the plant of an entry of the index, or raise ``IndexDamaged``."""
    is_inside = 0 <= offset < os.fstat(fd).st_size
    plant = line_at(fd, offset).plant if is_inside else None
    if plant is None or plant.id != id:
        raise IndexDamaged('an entry is not of this file')
    return plant


def _line(offset: int, text: bytes) -> Line:
    try:
        return Line(offset, text, record.decode(text), '')
    except record.DamagedRecord as ex:
        return Line(offset, text, None, str(ex))


def read_plants(path: Path) -> Iterator[Plant]:
    """Yield the plants of a file, which may be in use; nothing is changed."""
    with reading(path) as (fd, synced):
        end = whole_size(path, fd)
        check_length(path, fd, end, synced)
        lines = read_lines(fd, 0, end)
        while line := next(lines, None):
            if line.plant is not None:
                yield line.plant
                continue
            end = whole_size(path, fd)
            torn = _torn_tail(path, fd, line.offset, end, synced, crashed=False)
            if torn is not None and torn.offset == line.offset:
                log.warning('%s: a torn tail at byte %d is left out', path, torn.offset)
                break
            # Another process has cut off a torn tail, and may have appended.
            lines = read_lines(fd, line.offset, end)


@contextmanager
def reading(path: Path, flags: int = os.O_RDONLY) -> Iterator[tuple[int, int]]:
    """Open a plant file for a command; yield a descriptor, and the synced end.

    The caller asks for the size after that: others append and sync meanwhile. An
    ``OSError`` becomes a ``StoreUnavailable``.
    """
    try:
        with open(open_file(path, flags), 'rb') as file:
            index = Index(path, file.fileno())
            index.close()
            yield file.fileno(), index.synced
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex


def read_on(
    path: Path, fd: int, index: Index, end: int, ids: Iterable[int], *, crashed: bool
) -> tuple[dict[int, int], Line | None]:
    """Enter the lines up to ``end`` into an index; progress goes to the log.

    A plant may be there twice, and, if the machine may have ``crashed``, lost blocks.

    Returns:
        The offsets of those ids that are known then, unless the index is being built;
        and the first line of a torn tail, or ``None``.
    """
    start, size = index.end, end - index.end
    began = reported = time.monotonic()
    found: dict[int, int] = {}
    torn: Line | None = None
    for base, chunk in _chunks(fd, start, end, LEARNED):
        lines: list[tuple[int, int]] = []
        try:
            lines.extend(record.scan_ids(chunk, base))
        except record.DamagedRecord as ex:  # the lines before it were entered
            torn = _torn_tail(path, fd, base, end, index.synced, crashed=crashed)
            if torn is None:
                # Only a program that ignores the lock can have removed the damage.
                reason = 'another program changes the file'
                raise StoreUnavailable(reason, store=str(path)) from ex
        found = index.learn(lines, ids)
        for id, offset in lines:
            first = found[id]
            if first != offset and plant_at(fd, first, id) != plant_at(fd, offset, id):
                raise _corrupt(path, fd, offset, REPEATED % id)
        if torn is not None:
            break
        now = time.monotonic()
        if now - reported > PROGRESS_EVERY:
            reported = now
            percent = 100 * (base + len(chunk) - start) // size
            text = '%s: %d %% of %d MiB read, %d s'
            log.info(text, path, percent, size >> 20, now - began)
    # The table may know lines of other processes after the end of the file; not of the
    # file as it was: a command has no lock, and others append and flush meanwhile.
    check_length(path, fd, os.fstat(fd).st_size, index.end)
    return {id: found[id] for id in ids if id in found}, torn


def check_opening(path: Path) -> None:
    """Raise what an open of a plant file would raise; change nothing."""
    with open(open_file(path), 'rb') as file:
        fd = file.fileno()
        with closing(Index(path, fd)) as index:
            end = whole_size(path, fd)  # now: see ``reading``
            check_length(path, fd, end, index.synced)
            if index.reason is not None:
                index.build(temporary=True)
            with suppress(IndexDamaged):  # an open builds such an index again
                read_on(path, fd, index, end, (), crashed=True)


def cut_tail(path: Path, fd: int, offset: int) -> Path:
    """Move the bytes of a plant file from an offset on to a side file; return its path.

    REQUIRES: the lock. After an error the bytes are in the plant file or the side file.
    """
    end = os.fstat(fd).st_size
    side = copy_aside(path, fd, [(offset, end)], 'torn')
    try:
        # The point of no return: the bytes are durable in both files; the cut leaves
        # one. A crash before the sync may bring them back, to be cut again. The sync
        # must come before the next append: a crash could leave blocks of both, and the
        # beginning of a new record with the end of an old one may be a third record.
        os.ftruncate(fd, offset)
        os.fdatasync(fd)
    except BaseException:
        # An interrupt may come after the cut: then the side file is the only copy.
        if os.fstat(fd).st_size == end:
            os.unlink(side)
        raise
    return side


def write_again(fd: int, start: int) -> None:
    """Write the bytes from an offset on again, and sync them. REQUIRES: the lock."""
    while data := os.pread(fd, CHUNK, start):
        start += os.pwrite(fd, data, start)
    # NOTE: not fdatasync, which leaves out the mtime: the index has it.
    os.fsync(fd)


def whole_size(path: Path, fd: int) -> int:
    """Return the size of a plant file between two appends; takes the lock for that."""
    take_flock(path, fd, fcntl.LOCK_SH)
    try:
        return os.fstat(fd).st_size
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def check_length(path: Path, fd: int, size: int, known: int) -> None:
    """Refuse a plant file that is shorter than an end that it has had."""
    missing = known - size
    # An editor may have left out the last line feed.
    if missing > 1 or (missing == 1 and os.pread(fd, 1, size - 1) == b'\n'):
        raise StoreUnavailable(
            f'the file was cut short: {missing} bytes at its end are missing',
            store=str(path),
            detail='plants were acknowledged in them: put the whole file back; or '
            f'accept the loss: python -m store check --repair jsonl:{path}',
        )


def _corrupt(path: Path, fd: int, offset: int, reason: str) -> StoreCorrupt:
    return StoreCorrupt(str(path), 1 + count_lines(fd, 0, offset), offset, reason)


def count_lines(fd: int, start: int, end: int) -> int:
    """Return how many lines end between two offsets."""
    return sum(piece.count(b'\n') for piece in pieces(fd, start, end))


def _chunks(
    fd: int, start: int, end: int, size: int = CHUNK
) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of whole lines, each with its offset; the last may lack its feed."""
    offset = start
    unfinished: list[bytes] = []  # of a line; joined once, however long it is
    for data in pieces(fd, start, end, size):
        cut = data.rfind(b'\n') + 1
        if cut:
            whole = b''.join((*unfinished, data[:cut]))
            unfinished.clear()
            yield offset, whole
            offset += len(whole)
        unfinished.append(data[cut:])
    if any(unfinished):
        yield offset, b''.join(unfinished)


def _torn_tail(
    path: Path, fd: int, start: int, end: int, synced: int, *, crashed: bool
) -> Line | None:
    """Return the first line of a torn tail; ``None`` if no line is damaged any more."""
    lines = read_lines(fd, start, end)
    line = next((line for line in lines if line.plant is None), None)
    if line is None:
        return None
    if line.offset == 0:
        check_ours(path, fd)
    reason = line.reason
    if line.offset < synced:
        reason = f'{reason}, and it was acknowledged'
    elif (crashed and synced != UNKNOWN and _is_lost_block(line)) or all(
        other.plant is None for other in lines
    ):
        if end - line.offset <= MOST_TORN:
            return line
        reason = f'{reason}, and more follows than an unfinished write can leave'
    raise _corrupt(path, fd, line.offset, reason)


def check_ours(path: Path, fd: int) -> None:
    """Refuse a file of which no line is a plant, and that no crash can have left."""
    first = line_at(fd, 0)
    if not first.text or first.plant is not None or _is_torn_record(first):
        return
    reason = 'no line of it is a plant'
    if first.text.startswith(b'['):
        reason = 'it is a JSON array'  # of which the last line may be a plant
    elif any(line.plant is not None for line in read_lines(fd, 0, sys.maxsize)):
        return
    raise StoreUnavailable(f'it is not a file of plants: {reason}', store=str(path))


def _is_torn_record(line: Line) -> bool:
    """Whether a first line can be what a crash left of the first write."""
    whole, zeros, _ = line.text.partition(b'\0')
    return (
        bool(zeros or not line.text.endswith(b'\n'))
        and BEGINNING.startswith(whole[: len(BEGINNING)])
        and CONTROL.search(line.text) is None
        and line.reason in (record.NOT_JSON, record.NOT_UTF_8)
    )


def _is_lost_block(line: Line) -> bool:
    """Whether a line has zeros up to the end of a block."""
    _, zero, rest = line.text.partition(b'\0')
    zeros_end = line.offset + len(line.text) - len(rest.lstrip(b'\0'))
    return bool(zero) and zeros_end % BLOCK == 0
