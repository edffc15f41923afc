"""Reading a plant file that may be damaged, and telling a torn tail from damage.

A sync covers the whole file. So if a crash has lost some bytes, no byte that was
written after them was synced, and no plant there was acknowledged. After the end that
the latest sync covered, a crash can leave two things:

* a *torn tail*: everything from the first line that is not a record to the end of the
  file, when no record follows;
* a *lost block*: zeros up to the end of a block of the disk, where a later block of the
  same unsynced batch did reach the disk, so that records follow. A lost block is
  believed only when a store opens, and only after an end known to have been synced.

Both are cut off, and kept in a side file. A last record that lacks only its line feed,
as editors leave it, is kept: the beginning of a record is never a JSON object.

Any other damage may be in acknowledged lines: nothing is changed until an operator asks
for a repair. A file is not changed either if no crash can have left it: no line is a
record, or the damage is longer than all that can be written between two syncs.
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
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from store.base import Plant
from store.errors import StoreCorrupt, StoreUnavailable
from store.jsonl import record
from store.jsonl.disk import CHUNK, copy_aside, open_file, pieces, sync
from store.jsonl.index import UNKNOWN, Index
from store.jsonl.lock import take_flock
from store.jsonl.table import IndexDamaged

log = logging.getLogger(__name__)

BLOCK = 512  # bytes; the smallest piece that a disk loses
# Bytes of a torn tail: a batch has 1 MiB, four may wait for a sync, in each process.
MOST_TORN = 64 * 1024 * 1024
# Lines after the mark, whose ids stay in memory; a new table takes less.
MOST_BEHIND = 250_000
PROGRESS_EVERY = 2.0  # seconds between two progress lines in the log
REPEATED = 'an earlier line has a different plant with the id %d'
BEGINNING = b'{"id":'  # of each line that we write
CONTROL = re.compile(rb'[\x01-\x09\x0b-\x1f]')  # in no line that we write
Chunk = tuple[int, bytes, int]  # lines, and the offsets where they begin and end


class Line(NamedTuple):
    """A line of a plant file."""

    offset: int  # in bytes from the start of the file
    end: int  # where the next line begins
    text: bytes  # only the first LONGEST + 1 bytes of a line that is too long
    plant: Plant | None  # None if it is damaged
    reason: str  # why it is damaged


def read_lines(fd: int, start: int, end: int, chunk_size: int = 0) -> Iterator[Line]:
    """Yield the lines between two offsets, records and others alike."""
    for offset, chunk, stop in _chunks(fd, start, end, chunk_size):
        for text in BytesIO(chunk):
            # Of a line that is too long the chunk has only the beginning.
            after = stop if len(text) == len(chunk) else offset + len(text)
            try:
                yield Line(offset, after, text, record.decode(text), '')
            except record.DamagedRecord as ex:
                yield Line(offset, after, text, None, str(ex))
            offset = after


def line_at(fd: int, offset: int) -> Line:
    """Return the line that begins at an offset; its ``end`` holds only for a record."""
    lines = read_lines(fd, offset, offset + record.LONGEST + 1, chunk_size=512)
    return next(lines, Line(offset, offset, b'', None, record.NOT_JSON))


def plant_at(fd: int, offset: int, id: int) -> Plant:
    """Return the plant of an entry of the index, or raise ``IndexDamaged``."""
    is_inside = 0 <= offset < os.fstat(fd).st_size
    plant = line_at(fd, offset).plant if is_inside else None
    if plant is None or plant.id != id:
        raise IndexDamaged('an entry belongs to another file')
    return plant


def _chunks(fd: int, start: int, end: int, size: int = 0) -> Iterator[Chunk]:
    """Yield chunks of whole lines.

    The last may lack its line feed. A line longer than a chunk is a chunk of its own.
    Only the beginning is read of a line too long for a record: it may be huge.
    """
    size = size or CHUNK
    while start < end and (chunk := os.pread(fd, min(size, end - start), start)):
        if cut := chunk.rfind(b'\n') + 1:
            chunk = chunk[:cut]
            stop = start + cut
        else:
            stop = _end_of_line(fd, start, end)
            chunk = os.pread(fd, min(stop - start, record.LONGEST + 1), start)
        yield start, chunk, stop
        start = stop


def _end_of_line(fd: int, start: int, end: int) -> int:
    for data in pieces(fd, start, end):
        if feed := data.find(b'\n') + 1:
            return start + feed
        start += len(data)
    return start


def read_on(
    path: Path, fd: int, index: Index, end: int, ids: Iterable[int], *, crashed: bool
) -> tuple[dict[int, int], Line | None]:
    """Enter the lines up to ``end`` into an index; some may have a plant twice.

    Return the offsets of those ``ids`` that are known (not while the index is built),
    and the first line of a torn tail, or ``None``. A lost block counts as one if the
    machine may have ``crashed``.
    """
    found: dict[int, int] = {}
    torn: Line | None = None
    count = 0
    for start, chunk, _ in _with_progress(path, fd, index.end, end):
        lines: list[tuple[int, int]] = []
        try:
            lines.extend(record.scan_ids(chunk, start))
        except record.DamagedRecord as ex:  # ``lines`` has those before it
            torn = _find_torn_tail(path, fd, start, end, index.synced, crashed=crashed)
            if torn is None:
                # The damage is gone: a program that ignores the lock was here.
                reason = 'another program changes the file'
                raise StoreUnavailable(reason, store=str(path)) from ex
        count += len(lines)
        if count > MOST_BEHIND and index.build_reason is None:
            raise IndexDamaged('it is far behind the plant file')
        found = index.learn(lines, ids)  # of all ``ids``, not only those in the chunk
        for id, offset in lines:
            first = found[id]
            if first != offset and plant_at(fd, first, id) != plant_at(fd, offset, id):
                raise _corrupt(path, fd, offset, REPEATED % id)
        if torn is not None:
            break
    if index.end > end:  # without the lock: others append, and flush, meanwhile
        check_length(path, fd, os.fstat(fd).st_size, index.end)
    return {id: found[id] for id in ids if id in found}, torn


def _with_progress(path: Path, fd: int, start: int, end: int) -> Iterator[Chunk]:
    began = reported = time.monotonic()
    for chunk in _chunks(fd, start, end):
        yield chunk
        now = time.monotonic()
        if now - reported > PROGRESS_EVERY:
            reported = now
            percent = 100 * (chunk[-1] - start) // (end - start)
            text = '%s: %d %% of %d MiB read, %d s'
            log.info(text, path, percent, (end - start) >> 20, now - began)


def _find_torn_tail(
    path: Path, fd: int, start: int, end: int, synced: int, *, crashed: bool
) -> Line | None:
    """Return the first line of a torn tail; ``None`` if no line is damaged any more."""
    lines = read_lines(fd, start, end)
    line = next((line for line in lines if line.plant is None), None)
    if line is None:
        return None
    if line.offset == 0:
        check_ours(path, fd)
    is_lost = crashed and synced != UNKNOWN and _has_lost_block(fd, line)
    if line.offset < synced:
        more = ', and it was acknowledged'
    elif not is_lost and any(_may_be_plant(fd, it) for it in chain([line], lines)):
        more = ''
    elif end - line.offset > MOST_TORN:
        more = ', and more follows than an unfinished write can leave'
    else:
        return line
    raise _corrupt(path, fd, line.offset, line.reason + more)


def _has_lost_block(fd: int, line: Line) -> bool:
    """Whether a line has zeros up to the end of a block."""
    if (zeros := line.text.find(b'\0')) < 0:
        return False
    zeros_end = line.offset + zeros
    for data in pieces(fd, zeros_end, line.end):  # of a long line, too
        rest = data.lstrip(b'\0')
        zeros_end += len(data) - len(rest)
        if rest:
            break
    return zeros_end % BLOCK == 0


def _may_be_plant(fd: int, line: Line) -> bool:
    """Whether a line is a record, or one of a version that allowed longer bodies."""
    if line.reason == record.TOO_LONG:
        return os.pread(fd, 2, line.end - 2) == b'}\n'
    return line.plant is not None


def cut_tail(path: Path, fd: int, offset: int) -> Path:
    """Move the bytes of a plant file from an offset on to a side file; return its path.

    REQUIRES: the lock. After an error the bytes are in the plant file or the side file.
    """
    end = os.fstat(fd).st_size
    side = copy_aside(path, fd, [(offset, end)], 'torn')
    try:
        # The bytes are durable in the side file. The sync must come before the next
        # append: if a crash left blocks of both, the beginning of a new record and the
        # end of an old one could make a third record.
        os.ftruncate(fd, offset)
        sync(fd)
    except BaseException:
        # An interrupt may come after the cut: then the side file is the only copy.
        if os.fstat(fd).st_size == end:
            os.unlink(side)
        raise
    return side


def check_length(path: Path, fd: int, size: int, known: int) -> None:
    """Refuse a plant file that is shorter than it is known to have been."""
    missing = known - size
    # An editor may have left out the last line feed.
    if missing > 1 or (missing == 1 and os.pread(fd, 1, size - 1) == b'\n'):
        raise StoreUnavailable(
            f'the file was cut short: {missing} bytes at its end are missing',
            store=str(path),
            detail='they held acknowledged plants: put the whole file back; or '
            f'accept the loss: python -m store check --repair jsonl:{path}',
        )


def check_ours(path: Path, fd: int) -> None:
    """Refuse a JSON array, and a file without plants that no crash can have left."""
    first = line_at(fd, 0)
    if not first.text or first.plant is not None or _is_torn_record(first):
        return
    is_array = first.text.startswith(b'[')  # its last line may be a plant
    if is_array or not any(line.plant for line in read_lines(fd, 0, sys.maxsize)):
        reason = 'it is a JSON array' if is_array else 'no line of it is a plant'
        raise StoreUnavailable(f'it is not a file of plants: {reason}', store=str(path))


def _is_torn_record(line: Line) -> bool:
    """Whether a first line can be what a crash left of the first write."""
    whole, zeros, _ = line.text.partition(b'\0')
    return (
        bool(zeros or not line.text.endswith(b'\n'))
        and BEGINNING.startswith(whole[: len(BEGINNING)])
        and CONTROL.search(line.text) is None
        and line.reason in (record.NOT_JSON, record.NOT_UTF_8, record.TOO_LONG)
    )


def _corrupt(path: Path, fd: int, offset: int, reason: str) -> StoreCorrupt:
    number = 1 + sum(piece.count(b'\n') for piece in pieces(fd, 0, offset))
    return StoreCorrupt(str(path), number, offset, reason)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[tuple[int, int]]:
    """Open a plant file for a command; yield a descriptor, and the synced end.

    The caller must get the size after this: others append and sync meanwhile.
    """
    try:
        with open(open_file(path, flags), 'rb') as file:
            with closing(Index(path, file.fileno())) as index:
                synced = index.synced
            yield file.fileno(), synced
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex


def whole_size(path: Path, fd: int) -> int:
    """Return the size of a plant file between two appends; takes the lock for that."""
    take_flock(path, fd, fcntl.LOCK_SH)
    try:
        return os.fstat(fd).st_size
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def read_plants(path: Path) -> Iterator[Plant]:
    """Yield the plants of a file, which may be in use; nothing is changed."""
    with opened(path) as (fd, synced):
        end = whole_size(path, fd)
        check_length(path, fd, end, synced)
        lines = read_lines(fd, 0, end)
        while line := next(lines, None):
            if line.plant is not None:
                yield line.plant
                continue
            end = whole_size(path, fd)
            torn = _find_torn_tail(path, fd, line.offset, end, synced, crashed=False)
            if torn is not None and torn.offset == line.offset:
                log.warning('%s: a torn tail at byte %d is left out', path, torn.offset)
                break
            # Another process has cut off a torn tail, and may have appended.
            lines = read_lines(fd, line.offset, end)


def check_opening(path: Path) -> None:
    """Raise what an open of a plant file would raise; change nothing."""
    with open(open_file(path), 'rb') as file:
        fd = file.fileno()
        for is_new in False, True:  # an open rebuilds an index that it cannot use
            with closing(Index(path, fd, new=is_new)) as index, suppress(IndexDamaged):
                end = whole_size(path, fd)  # now: see ``opened``
                check_length(path, fd, end, index.synced)
                if index.build_reason is not None:
                    index.build(temporary=True)
                read_on(path, fd, index, end, (), crashed=True)
                return
