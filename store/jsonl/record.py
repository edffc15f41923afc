r"""One line of a plant file: a record.

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
import re
from itertools import accumulate
from typing import Any

from store.base import ID_MAX, ID_MIN, OPTIONAL, TEXTS, Plant, check_plant
from store.errors import StoreError

# NOTE: a prebuilt encoder: json.dumps() with arguments builds one at every call.
_quote = json.JSONEncoder(ensure_ascii=False).encode
_HEADS = [f',"{member}":' for member in TEXTS]

# Bytes of a record without its line feed, and of a body (PLANTS_MAX_BODY): enough for a
# name of 2**20 characters, each escaped (\u0001). Reading may take 16 times as many.
LONGEST = 13 * 512 * 1024
NOT_UTF_8, NOT_JSON, UTF_16 = 'it is not UTF-8', 'it is not JSON', 'it is UTF-16'
TOO_LONG = f'it is longer than {LONGEST} bytes'
WHITE_SPACE = b' \t\r\n'

# A line that we write without escapes; the group is its id. Such a line is a record if
# it is UTF-8 and its id has 64 bits. decode() takes six times as long.
_MEMBERS = ''.join(
    rf'(?:,"{member}":"[^"\\\x00-\x1f]*+"){"?" * (member in OPTIONAL)}+'
    for member in TEXTS
)
_OURS = rf'\{{"id":(0|-?[1-9][0-9]{{0,18}}+){_MEMBERS}\}}\n'.encode()
_find_ours = re.compile(rb'(?m)^' + _OURS).findall
_each_line = re.compile(_OURS + rb'|.*\n|.+').finditer


class DamagedRecord(ValueError):
    """A line is not a record; the message says why."""


# NOTE: int() refuses NaN and Infinity, which are not JSON. It also refuses very long
# integers, which are JSON: cut to 99 digits they are accepted, and too long for an id.
_decode = json.JSONDecoder(
    parse_int=lambda literal: int(literal[:99]), parse_constant=int
).decode


def encode(plant: Plant) -> bytes:
    """Return the record of a plant, or raise ``StoreError`` if it would be too long."""
    texts = zip(_HEADS, plant[1:], strict=True)
    rest = [head + _quote(text) for head, text in texts if text is not None]
    line = f'{{"id":{plant.id}{"".join(rest)}}}\n'.encode()
    if len(line) > LONGEST + 1:
        raise StoreError(f'the plant with id {plant.id}: as a line {TOO_LONG}')
    return line


def decode(line: bytes, encoding: str = 'utf-8') -> Plant:
    """Return the plant of a line, or raise ``DamagedRecord``; it needs no line feed."""
    if len(line) - line.endswith(b'\n') > LONGEST:
        raise DamagedRecord(TOO_LONG)
    try:
        value: Any = _decode(line.decode(encoding))
    except (ValueError, RecursionError) as ex:
        # As ">>" of PowerShell appends it.
        is_wide = line.startswith((b'\xff\xfe', b'\xfe\xff')) or b'"\0:\0' in line
        not_text = isinstance(ex, UnicodeDecodeError)
        reason = UTF_16 if is_wide else NOT_UTF_8 if not_text else NOT_JSON
        raise DamagedRecord(reason) from ex
    if not isinstance(value, dict):
        raise DamagedRecord('it is not a JSON object')
    for member in OPTIONAL & value.keys():
        if value[member] is None:
            raise DamagedRecord(f'{member}: null is not a string')
    plant = Plant(*map(value.get, Plant._fields))  # type: ignore[arg-type]
    try:
        check_plant(plant)
    except ValueError as ex:
        raise DamagedRecord(str(ex)) from ex
    return plant


def scan(chunk: bytes, start: int) -> tuple[list[int], list[int], int]:
    """Return the ids of the records at the beginning of a chunk, and their offsets.

    The third value is the offset where they end: before the first line that is damaged
    or lacks its line feed, or at the end of the chunk.
    """
    try:
        chunk.decode()
        encoding = 'latin-1'  # the same id; a long text takes a quarter of the memory
    except UnicodeDecodeError:
        encoding = 'utf-8'  # decode() finds the damaged line
    ids = [*map(int, _find_ours(chunk))] if encoding == 'latin-1' else []
    lines = chunk.split(b'\n')
    if 0 < len(ids) == len(lines) - 1 and min(ids) >= ID_MIN and max(ids) <= ID_MAX:
        *offsets, end = accumulate([len(line) + 1 for line in lines[:-1]], initial=0)
        return ids, [start + offset for offset in offsets], start + end
    # Other lines than ours are among them: one at a time.
    ids, offsets, end = [], [], start
    for line in _each_line(chunk):
        if not line[0].endswith(b'\n'):
            break
        if line[0].strip(WHITE_SPACE):
            try:
                ids.append(decode(line[0], encoding).id)
            except DamagedRecord:
                break
            offsets.append(start + line.start())
        end = start + line.end()
    return ids, offsets, end
