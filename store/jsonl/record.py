r"""One line of a plant file: a record.

**A line is a record if it ends in a line feed, and the rest is one JSON object in UTF-8
with the members of a plant** (whole definition: ``docs/stores.md``). Our own lines have
no white space, this order of members, and only the escapes that RFC 8259, section 7,
requires::

    {"id":1,"name":"Fern","tag":"shade"}\n

The line feed is the commit mark. It is the last byte of a record and nowhere else in
it: a string can only hold it escaped. (An open adds the one that an editor has left out
at the end.)
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from store.base import ID_MAX, ID_MIN, Plant, check_plant

# NOTE: a prebuilt encoder: json.dumps() with arguments builds one at every call.
_quote = json.JSONEncoder(ensure_ascii=False).encode

NOT_UTF_8, NOT_JSON = 'it is not UTF-8', 'it is not JSON'

# A line. Nearly all, our own without an escape, have their id as the group: such a line
# is a record if it is UTF-8 and its id has 64 bits. decode() takes six times as long.
_LINE = re.compile(
    rb'\{"id":(0|-?[1-9][0-9]{0,18}),"name":"[^"\\\x00-\x1f]*"'
    rb'(?:,"tag":"[^"\\\x00-\x1f]*")?\}\n'
    rb'|.*\n|.+'
)


class DamagedRecord(ValueError):
    """A line is not a record; the message says why."""


def _int(literal: str) -> float:
    # int() refuses longer ones: its time grows with the square of the length. They may
    # be in a member that means nothing here; elsewhere inf is no integer.
    is_short = len(literal) <= sys.int_info.default_max_str_digits
    return int(literal) if is_short else float(literal)


# NOTE: int() refuses NaN and Infinity, which are not JSON.
_decode = json.JSONDecoder(parse_int=_int, parse_constant=int).decode


def encode(plant: Plant) -> bytes:
    """Return the record of a plant that was checked, its line feed included."""
    id, name, tag = plant
    if tag is None:
        return f'{{"id":{id},"name":{_quote(name)}}}\n'.encode()
    return f'{{"id":{id},"name":{_quote(name)},"tag":{_quote(tag)}}}\n'.encode()


def decode(line: bytes) -> Plant:
    """Return the plant of a line, or raise ``DamagedRecord``; it needs no line feed."""
    try:
        value: Any = _decode(line.decode())
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

    It raises ``DamagedRecord`` when the ids before the damaged line were yielded.
    """
    try:
        chunk.decode()
        is_text = True
    except UnicodeDecodeError:  # decode() finds the damaged line
        is_text = False
    for line in _LINE.finditer(chunk):
        literal = line[1]
        if is_text and literal and ID_MIN <= (id := int(literal)) <= ID_MAX:
            yield id, start + line.start()
        else:
            yield decode(line[0]).id, start + line.start()
