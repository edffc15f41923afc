r"""One line of a plant file: a record.

**A line is a record if it ends in a line feed, and the rest is one JSON object in UTF-8
with the members of a plant** (whole definition: ``docs/stores.md``). Our own lines have
no white space, this order of members, and only the escapes that RFC 8259, section 7,
requires::

    {"id":1,"name":"Fern","tag":"shade"}\n

The line feed is the commit mark: a string can only hold it escaped. (An open adds a
last line feed that an editor has left out.)
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from store.base import ID_MAX, ID_MIN, Plant, check_plant
from store.errors import StoreError

# NOTE: a prebuilt encoder: json.dumps() with arguments builds one at every call.
_quote = json.JSONEncoder(ensure_ascii=False).encode

# Bytes of a record without its line feed, and of a body (PLANTS_MAX_BODY): enough for a
# name of 2**20 characters, each escaped (\u0001). Reading may take 16 times as many.
LONGEST = 13 * 512 * 1024
NOT_UTF_8, NOT_JSON = 'it is not UTF-8', 'it is not JSON'
TOO_LONG = f'it is longer than {LONGEST} bytes'

# A line. The group is the id of a line that we write without escapes: such a line is a
# record if it is UTF-8 and its id has 64 bits. decode() takes six times as long.
_LINE = re.compile(
    rb'\{"id":(0|-?[1-9][0-9]{0,18}),"name":"[^"\\\x00-\x1f]*"'
    rb'(?:,"tag":"[^"\\\x00-\x1f]*")?\}\n'
    rb'|.*\n|.+'
)


class DamagedRecord(ValueError):
    """A line is not a record; the message says why."""


# NOTE: int() refuses NaN and Infinity, which are not JSON. It also refuses very long
# integers, which are JSON: cut to 99 digits they are accepted, and too long for an id.
_decode = json.JSONDecoder(
    parse_int=lambda literal: int(literal[:99]), parse_constant=int
).decode


def encode(plant: Plant) -> bytes:
    """Return the record of a plant that was checked, its line feed included.

    Raises:
        StoreError: It would be longer than a record may be.
    """
    id, name, tag = plant
    rest = '' if tag is None else f',"tag":{_quote(tag)}'
    line = f'{{"id":{id},"name":{_quote(name)}{rest}}}\n'.encode()
    if len(line) > LONGEST + 1:
        raise StoreError(f'the plant with id {id}: as a line {TOO_LONG}')
    return line


def decode(line: bytes, encoding: str = 'utf-8') -> Plant:
    """Return the plant of a line, or raise ``DamagedRecord``; it needs no line feed."""
    if len(line) - line.endswith(b'\n') > LONGEST:
        raise DamagedRecord(TOO_LONG)
    try:
        value: Any = _decode(line.decode(encoding))
    except UnicodeDecodeError as ex:
        raise DamagedRecord(NOT_UTF_8) from ex
    except (ValueError, RecursionError) as ex:
        raise DamagedRecord(NOT_JSON) from ex
    if not isinstance(value, dict):
        raise DamagedRecord('it is not a JSON object')
    get: Any = value.get
    plant = Plant(get('id'), get('name'), get('tag'))
    try:
        check_plant(plant)
    except ValueError as ex:
        raise DamagedRecord(str(ex)) from ex
    if plant.tag is None and 'tag' in value:
        raise DamagedRecord('tag: null is not a string')
    return plant


def scan_ids(chunk: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield the id and the offset of each record in a chunk of whole lines.

    Raise ``DamagedRecord`` at a damaged line, after the ids before it.
    """
    try:
        chunk.decode()
        encoding = 'latin-1'  # the same id; a long text takes a quarter of the memory
    except UnicodeDecodeError:  # decode() finds the damaged line
        encoding = 'utf-8'
    for line in _LINE.finditer(chunk):
        literal = line[1]
        is_ours = literal and encoding != 'utf-8'
        if is_ours and ID_MIN <= (id := int(literal)) <= ID_MAX:
            yield id, start + line.start()
        else:
            yield decode(line[0], encoding).id, start + line.start()
