r"""The lines of a plant file: records, blank lines, and damaged ones.

**A line is a record if it ends in a line feed, and the rest is one JSON object in UTF-8
with the members of a plant** (whole definition: ``docs/stores.md``). Our own lines have
no white space, the members in the order of ``Plant``, and only the escapes that RFC
8259, section 7, requires::

    {"id":1,"name":"Fern","tag":"shade"}\n

The line feed is the commit mark: a string can only hold it escaped. (A last line feed
that an editor has left out is added.) A *blank* line, of white space alone, is no
record and no damage: every reader skips it.
"""

import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from store.base import ID_MAX, ID_MIN, OPTIONAL, TEXTS, Plant, check_plant, to_json
from store.errors import StoreCorrupt, StoreError
from store.jsonl import disk

_HEADS = [f',"{member}":' for member in TEXTS]

# Bytes of a record without its line feed, and of a body (PLANTS_MAX_BODY): enough for a
# name of 2**20 characters, each escaped (\u0001). Reading may take 16 times as many.
LONGEST = 13 * 512 * 1024
TOO_LONG = f'it is longer than {LONGEST} bytes'
WHITE_SPACE = b' \t\r\n'
NEAR, FAR = 512, 128 * 1024  # bytes; most lines end so near, and nearly all so far

# A line that we write without escapes; the group is its id. Such a line is a record if
# it is UTF-8 and its id has 64 bits. decode() takes six times as long.
_MEMBERS = ''.join(
    rf'(?:,"{member}":"[^"\\\x00-\x1f]*+"){"?" * (member in OPTIONAL)}+'
    for member in TEXTS
)
_OURS = rf'\{{"id":(0|-?[1-9][0-9]{{0,18}}+){_MEMBERS}\}}\n'.encode()
_find_ours = re.compile(rb'(?m)^' + _OURS).findall
_each_line = re.compile(_OURS + rb'|.*\n|.+').finditer

# NOTE: int() refuses NaN and Infinity, which are not JSON. It also refuses very long
# integers, which are JSON: cut to 99 digits they are accepted, and too long for an id.
_decode = json.JSONDecoder(
    parse_int=lambda literal: int(literal[:99]), parse_constant=int
).decode


def encode(plant: Plant) -> bytes:
    """Return the record of a plant, or raise ``StoreError`` if it would be too long."""
    texts = zip(_HEADS, plant[1:])
    rest = [head + to_json(text) for head, text in texts if text is not None]
    line = f'{{"id":{int(plant.id)}{"".join(rest)}}}\n'.encode()
    if len(line) > LONGEST + 1:
        raise StoreError(f'the plant with id {plant.id}: as a line {TOO_LONG}')
    return line


def decode(line: bytes) -> Plant:
    """Return the plant of a line, or ``ValueError`` says why; it needs no line feed."""
    if len(line) - line.endswith(b'\n') > LONGEST:
        raise ValueError(TOO_LONG)
    try:
        value: Any = _decode(line.decode())
    except UnicodeDecodeError as ex:
        raise ValueError('it is not UTF-8') from ex
    except (ValueError, RecursionError) as ex:
        raise ValueError('it is not JSON') from ex
    if not isinstance(value, dict):
        raise ValueError('it is not a JSON object')
    for member in OPTIONAL & value.keys():
        if value[member] is None:
            raise ValueError(f'{member}: null is not a string')
    plant = Plant(*map(value.get, Plant._fields))  # type: ignore[arg-type]
    check_plant(plant)
    return plant


class Line(NamedTuple):
    """A line of a plant file. A blank one has neither a plant nor a reason."""

    offset: int  # in bytes from the start of the file
    end: int  # where the next line begins
    text: bytes  # only the first LONGEST + 1 bytes of a line that is too long
    plant: Plant | None
    reason: str = ''  # why it is damaged


class Damage(Exception):
    """A line is damaged; ``corrupt`` tells its number."""

    def __init__(self, line: Line, reason: str) -> None:
        super().__init__(reason)
        self.offset, self.text, self.reason = line.offset, line.text, reason

    def corrupt(self, path: Path, fd: int) -> StoreCorrupt:
        """Return the error to raise; all before the line is read, for its number."""
        feeds = sum(part.count(b'\n') for part in disk.pieces(fd, 0, self.offset))
        return StoreCorrupt(str(path), 1 + feeds, self.offset, self.reason)


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
    for size in NEAR, FAR, LONGEST + 1:
        text = os.pread(fd, size, offset)
        if feed := text.find(b'\n') + 1:
            text = text[:feed]
        if feed or len(text) < size:
            break
    return _line(offset, offset + len(text), text)


def _line(offset: int, end: int, text: bytes) -> Line:
    try:
        is_whole = text.endswith(b'\n') or len(text) <= LONGEST
        is_blank = is_whole and not text.strip(WHITE_SPACE)
        return Line(offset, end, text, None if is_blank else decode(text))
    except ValueError as ex:
        return Line(offset, end, text, None, str(ex))


def first_offset(fd: int) -> int:
    """Return where the first line begins: after a byte order mark (RFC 8259, 8.1)."""
    return len(BOM_UTF8) if os.pread(fd, len(BOM_UTF8), 0) == BOM_UTF8 else 0


def chunks(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield chunks of whole lines, and the offsets where each begins and ends.

    The last may lack its line feed. A line longer than a chunk is one of its own. Of a
    line too long for a record only the beginning is read: it may be huge.
    """
    start = start or first_offset(fd)
    while start < end and (chunk := os.pread(fd, min(disk.CHUNK, end - start), start)):
        stop = start + (cut := chunk.rfind(b'\n') + 1)
        if cut:
            chunk = chunk[:cut]
        else:
            for data in disk.pieces(fd, start, end):
                stop += (feed := data.find(b'\n') + 1) or len(data)
                if feed:
                    break
            chunk = os.pread(fd, min(stop - start, LONGEST + 1), start)
        yield start, chunk, stop
        start = stop


def scan(chunk: bytes, start: int) -> tuple[list[tuple[int, int]], int]:
    """Return the ids of the records that begin a chunk, with offsets, and their end.

    It is that of the chunk, or before a line that is damaged or lacks its line feed.
    """
    try:
        chunk.decode()
        ids = [*map(int, _find_ours(chunk))]
    except UnicodeDecodeError:
        ids = []  # decode() finds the damaged line
    found, lines = [], chunk.splitlines(True)
    if 0 < len(ids) == len(lines) and min(ids) >= ID_MIN and max(ids) <= ID_MAX:
        offsets = accumulate(map(len, lines), initial=start)
        return [*zip(ids, offsets)], start + len(chunk)
    for match in _each_line(chunk):
        digits, offset = match[1], start + match.start()
        if ids and digits and ID_MIN <= (id := int(digits)) <= ID_MAX:
            found.append((id, offset))
            continue
        line = _line(offset, start + match.end(), match[0])
        if line.reason or not line.text.endswith(b'\n'):
            return found, offset
        if line.plant:
            found.append((line.plant.id, offset))
    return found, start + len(chunk)
