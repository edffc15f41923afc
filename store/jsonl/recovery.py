"""Telling what a crash leaves in a plant file from damage, and what is done about it.

A sync covers the whole file. So if a crash has lost some bytes, no byte that was
written after them was synced, and no plant there was acknowledged. What a crash can
leave, by the first line that is not a record:

=============  ==================================  =====================================
what           how it is known                     what is done
=============  ==================================  =====================================
no line feed   the last line is a record, or       the line feed is added
               blank, but for its line feed, as
               editors leave it
*torn tail*    no whole line follows; the line     it is cut off, to the end of the file
               begins as ours do, is no complete
               JSON value, and is unterminated or
               has *lost blocks*
*lost block*   whole lines follow: a later block   the line is blanked in place, so that
               of the same unsynced write did      the records after it are kept; only
               reach the disk                      when a store opens, near the end
=============  ==================================  =====================================

A lost block reads as NULs, and ends where a block of a disk ends or the file does: at a
multiple of 512 bytes. Before something is cut or blanked its bytes are copied to a side
file. **No record is ever cut.**

Everything else was written by another program, or was acknowledged. It is *damage*, and
nothing is changed until an operator asks for a repair: an open fails, and so does a
reader, which must never succeed with fewer plants.
"""

import codecs
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from store import forks
from store.base import Plant
from store.jsonl import disk
from store.jsonl.known import UNSYNCED
from store.jsonl.record import Damage, Line, line_at, read_lines

log = logging.getLogger(__name__)

BLOCK = 512  # bytes; the smallest piece that a disk loses
BEGINNING = b'{"id":'  # of each line that we write
CONTROL = re.compile(rb'[\x01-\x1f]')  # in no part of such a line
NO_LINE_FEED, TORN_TAIL, LOST_BLOCK = 'no line feed', 'a torn tail', 'a lost block'


def judge(fd: int, start: int, end: int, *, is_opening: bool) -> Line:
    """Return the first line after ``start`` that is no whole record.

    Its reason is one of the three above. Any other raises ``Damage``.
    """
    lines = read_lines(fd, start, end)
    line = next(lines, Line(start, end, b'', None))
    if not line.reason:
        return line._replace(reason=NO_LINE_FEED)
    are_whole = any(map(_is_whole, lines))
    if are_whole and is_opening and start >= end - UNSYNCED and _is_lost(line, end):
        return line._replace(reason=LOST_BLOCK)
    if not are_whole and _is_torn(line, end):
        return line._replace(reason=TORN_TAIL)
    raise Damage(line, line.reason)


def _is_whole(line: Line) -> bool:
    """Whether a line that is not blank has all its bytes, whoever wrote them."""
    ends = line.text.endswith(b'\n') and b'\0' not in line.text
    return line.plant is not None or (line.reason != '' and ends)


def _is_torn(line: Line, end: int) -> bool:
    """Whether a crash can have left a line, the last one, of a record of ours."""
    before, lost, _ = line.text.partition(b'\0')
    is_longer = line.end - line.offset > len(line.text)  # than any record: not ours
    if is_longer or not BEGINNING.startswith(before[: len(BEGINNING)]):
        return False
    if lost:
        return _is_lost(line, end)
    if CONTROL.search(line.text):  # a line feed, for example
        return False
    try:
        # A part of a record is no JSON value, and does not begin with one.
        json.JSONDecoder().raw_decode(codecs.utf_8_decode(line.text)[0])
    except (ValueError, RecursionError) as ex:
        return isinstance(ex, json.JSONDecodeError)
    return False


def _is_lost(line: Line, end: int) -> bool:
    """Whether a line has lost blocks; ``blank`` may have been interrupted in it."""
    ends = [line.offset + run.end() for run in re.finditer(rb'\0+', line.text)]
    # Of the file, and of a line of NULs before its line feed.
    edges = {end, line.offset + len(line.text.rstrip(b'\n'))}
    return bool(ends) and all(at % BLOCK == 0 or at in edges for at in ends)


def cut(path: Path, fd: int, start: int, end: int) -> Path:
    """Cut off a torn tail; return the side file with its bytes.

    A sync must come before the next append: if a crash left blocks of both, the
    beginning of a new record and the end of an old one could make a third record.

    REQUIRES: the lock. After an error the bytes are in the plant file or the side file.
    """
    side = disk.copy_aside(path, fd, [(start, end)], 'torn')
    try:
        os.ftruncate(fd, start)
    except OSError:
        if os.fstat(fd).st_size == end:  # or each attempt would leave another copy
            os.unlink(side)
        raise
    return side


def blank(
    path: Path, fd: int, spans: disk.Spans, kind: str, sync: Callable[[], object]
) -> Path:
    """Blank lines in place; return the side file with their bytes.

    First with NULs, then with spaces: at no moment can a crash leave a part of a line
    that is a record. Whatever it leaves is mended by the next call for the same lines.

    REQUIRES: the lock.
    """
    for _, end in spans:  # as it is: a disk that fails must fail before the copy
        disk.write(fd, os.pread(fd, 1, end - 1), end - 1)
    sync()
    side = disk.copy_aside(path, fd, spans, kind)
    size = min(disk.CHUNK, max(end - start for start, end in spans))
    # In several lines, or a reader would take it for one that is too long.
    for fill in bytes(size), b' ' * (size - 1) + b'\n':
        for start, end in spans:
            for at in range(start, end - 1, size):
                disk.write(fd, fill[: end - 1 - at], at)
            disk.write(fd, b'\n', end - 1)
        sync()
    return side


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a plant file to read it; only a torn tail may be cut off meanwhile."""
    opening = partial(disk.open_file, path, flags)
    with disk.Refusing(path), forks.opened(opening) as file:
        fd, size = file.fileno(), os.fstat(file.fileno()).st_size
        is_whole = os.pread(fd, 1, max(0, size - 1)) == b'\n'
        yield fd
        if is_whole and os.fstat(fd).st_size < size:
            raise OSError('the file was cut short')


def whole_size(path: Path, fd: int) -> int:
    """Return the size of a plant file between two appends."""
    return disk.locked(path, fd, partial(os.fstat, fd), operation=fcntl.LOCK_SH).st_size


def settled_lines(path: Path, fd: int) -> Iterator[Line]:
    """Yield the lines of a file that may be in use."""
    lines = read_lines(fd, 0, whole_size(path, fd))
    while line := next(lines, None):
        if line.reason:  # another process may have mended it, and have appended
            end = whole_size(path, fd)
            if line_at(fd, line.offset).text != line.text:
                lines = read_lines(fd, line.offset, end)
                continue
        yield line


def read_plants(path: Path, fd: int) -> Iterator[Plant]:
    """Yield the plants of a file, which may be in use; nothing is changed."""
    for line in settled_lines(path, fd):
        if line.plant is not None:
            yield line.plant
        elif line.reason:
            try:
                judge(fd, line.offset, whole_size(path, fd), is_opening=False)
            except Damage as ex:
                raise ex.corrupt(path, fd) from None
            log.warning('%s: a torn tail at byte %d is left out', path, line.offset)
            return
