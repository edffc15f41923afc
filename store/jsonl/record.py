r"""One line of a plant file.

A plant file is a sequence of records and nothing else. A record is one line::

    {"id":1,"name":"Fern","tag":"shade"}\n

* The text is UTF-8 (RFC 3629) and, without its line feed, one JSON object (RFC 8259).
* ``id`` is an integer literal from -2**63 to 2**63 - 1; ``name`` is a string; ``tag``
  is a string, or the member is not there. No string holds U+0000 or a lone surrogate.
* The line feed (0x0A) is the commit mark, and it is the last byte of the record: JSON
  text of one line holds no other, since a string can only hold it escaped.

**A record is valid if and only if it ends in a line feed and the rest of the line is
such an object.** Other members, other white space and another order of members are
allowed, so a line that was written by hand is as good as ours; they mean nothing.

Ours is written without white space, members in the order above, nothing escaped
that RFC 8259, section 7, does not require to be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from typing import NoReturn

from store.base import Plant

ID_MIN = -(2**63)
ID_MAX = 2**63 - 1

# NOTE: a prebuilt encoder: json.dumps() with arguments builds one at every call.
_quote = json.JSONEncoder(ensure_ascii=False).encode

# Our own lines without an escape, which are nearly all of them: what this pattern
# matches is valid if it is also UTF-8. It reads a file six times as fast as decode().
_PLAIN = re.compile(
    rb'\{"id":(0|-?[1-9][0-9]{0,18}),"name":"[^"\\\x00-\x1f]*"'
    rb'(?:,"tag":"[^"\\\x00-\x1f]*")?\}\n'
)


class DamagedRecord(ValueError):
    """A line is not a record; the message says why."""


def _int(literal: str) -> int | None:
    # An id is never longer. What is, is in a member that means nothing here, and its
    # conversion takes time with the square of its length.
    return int(literal) if len(literal) <= 20 else None


def _constant(literal: str) -> NoReturn:
    raise DamagedRecord('it is not JSON')


_decode = json.JSONDecoder(parse_int=_int, parse_constant=_constant).decode


def encode(plant: Plant) -> bytes:
    """Return the record of a plant, its line feed included.

    Raises:
        ValueError: The plant is not one: what is written must be read again.
    """
    id, name, tag = plant
    if not ID_MIN <= id <= ID_MAX or '\0' in name or '\0' in (tag or ''):
        raise ValueError(f'{id} is not a 64-bit integer, or a text holds U+0000')
    if tag is None:
        return f'{{"id":{id},"name":{_quote(name)}}}\n'.encode()
    return f'{{"id":{id},"name":{_quote(name)},"tag":{_quote(tag)}}}\n'.encode()


def decode(line: bytes) -> Plant:
    """Return the plant of a record.

    Args:
        line: The bytes up to and including the line feed.

    Raises:
        DamagedRecord: The line is not a record.
    """
    if not line.endswith(b'\n'):
        raise DamagedRecord('it has no line feed at its end')
    try:
        value: Any = _decode(line.decode())
    except UnicodeDecodeError as ex:
        raise DamagedRecord('it is not UTF-8') from ex
    except (ValueError, RecursionError) as ex:
        raise DamagedRecord('it is not JSON') from ex
    if not isinstance(value, dict):
        raise DamagedRecord('it is not a JSON object')
    id = value.get('id')
    if type(id) is not int or not ID_MIN <= id <= ID_MAX:
        raise DamagedRecord('its id is not a 64-bit integer')
    tag = value.get('tag')
    _check_text('name', value.get('name'))
    if 'tag' in value:
        _check_text('tag', tag)
    return Plant(id, value['name'], tag)


def _check_text(member: str, text: object) -> None:
    if not isinstance(text, str):
        raise DamagedRecord(f'its {member} is not a string')
    if '\0' in text:
        raise DamagedRecord(f'its {member} holds U+0000')
    try:
        text.encode()
    except UnicodeEncodeError as ex:
        raise DamagedRecord(f'its {member} holds a lone surrogate') from ex


def scan_ids(chunk: bytes) -> Iterator[tuple[int, int]]:
    """Yield the id and the offset of each record in whole lines.

    Args:
        chunk: Any number of whole lines.

    Raises:
        DamagedRecord: A line is not a record; the ids before it were yielded.
    """
    try:
        chunk.decode()
        match = _PLAIN.match
    except UnicodeDecodeError:
        match = re.compile(
            b'(?!)'
        ).match  # not plain, any of it: decode() finds out where
    offset = 0
    size = len(chunk)
    while offset < size:
        plain = match(chunk, offset)
        if plain and ID_MIN <= (id := int(plain[1])) <= ID_MAX:
            yield id, offset
            offset = plain.end()
        else:
            end = chunk.index(b'\n', offset) + 1
            yield decode(chunk[offset:end]).id, offset
            offset = end
