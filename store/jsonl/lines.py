"""Reading the lines of a plant file, records and others alike."""

import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from store.base import Plant
from store.errors import StoreCorrupt
from store.jsonl import disk, record

Chunk = tuple[int, bytes, int]  # lines, and the offsets where they begin and end
NEAR, FAR = 512, 128 * 1024  # bytes; most lines end so near, and nearly all so far


class Damage(Exception):
    """The line at an offset is damaged; ``corrupt`` tells its number."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset, self.reason = offset, reason
        self.state: object = None  # of the file, under the lock


class Line(NamedTuple):
    """A line of a plant file. A blank one has neither a plant nor a reason."""

    offset: int  # in bytes from the start of the file
    end: int  # where the next line begins
    text: bytes  # only the first LONGEST + 1 bytes of a line that is too long
    plant: Plant | None
    reason: str = ''  # why it is damaged

    @property
    def is_blank(self) -> bool:
        """Whether every reader skips it."""
        return self.plant is None and not self.reason


def read_lines(fd: int, start: int, end: int) -> Iterator[Line]:
    """Yield the lines between two offsets; the last may lack its line feed."""
    for offset, chunk, stop in chunks(fd, start, end):
        for text in BytesIO(chunk):
            # Of a line that is too long the chunk has only the beginning.
            after = stop if len(text) == len(chunk) else offset + len(text)
            yield _line(offset, after, text)
            offset = after


def line_at(fd: int, offset: int) -> Line:
    """Return the line that begins at an offset; its ``end`` holds only for a record."""
    text = b''
    for size in NEAR, FAR, record.LONGEST + 1:
        text = os.pread(fd, size, offset)
        if feed := text.find(b'\n') + 1:
            text = text[:feed]
        if feed or len(text) < size:
            break
    return _line(offset, offset + len(text), text)


def _line(offset: int, end: int, text: bytes) -> Line:
    try:
        is_whole = text.endswith(b'\n') or len(text) <= record.LONGEST
        is_blank = is_whole and not text.strip(record.WHITE_SPACE)
        return Line(offset, end, text, None if is_blank else record.decode(text))
    except record.DamagedRecord as ex:
        return Line(offset, end, text, None, str(ex))


def first_offset(fd: int) -> int:
    """Return where the first line begins: after a byte order mark (RFC 8259, 8.1)."""
    return len(BOM_UTF8) if os.pread(fd, len(BOM_UTF8), 0) == BOM_UTF8 else 0


def chunks(fd: int, start: int, end: int) -> Iterator[Chunk]:
    """Yield chunks of whole lines; the last may lack its line feed.

    A line longer than a chunk is a chunk of its own. Of one too long for a record only
    the beginning is read: it may be huge.
    """
    start = start or first_offset(fd)
    while start < end and (chunk := os.pread(fd, min(disk.CHUNK, end - start), start)):
        if cut := chunk.rfind(b'\n') + 1:
            chunk = chunk[:cut]
            stop = start + cut
        else:
            stop = start
            for data in disk.pieces(fd, start, end):
                stop += (feed := data.find(b'\n') + 1) or len(data)
                if feed:
                    break
            chunk = os.pread(fd, min(stop - start, record.LONGEST + 1), start)
        yield start, chunk, stop
        start = stop


def corrupt(path: Path, fd: int, damage: Damage) -> StoreCorrupt:
    """Return the error of a damaged line; all before it is read, for its number."""
    feeds = sum(piece.count(b'\n') for piece in disk.pieces(fd, 0, damage.offset))
    return StoreCorrupt(str(path), 1 + feeds, damage.offset, damage.reason)
