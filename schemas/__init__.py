"""JSON text and JSON Schema: read a body strictly, validate it, describe its faults.

The rules of the members are in the JSON Schema files beside this module (draft 2020-12)
and nowhere else: edit a file, reload, and the rule has changed. This module decides
what RFC 8259 leaves open about JSON text (``docs/api.md`` lists it).

jsonschema checks the files at the start. jsonschema-rs validates bodies with them: it
needs 1 us for a plant, jsonschema 50 to 80.
"""

import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import jsonschema_rs
from jsonschema import Draft202012Validator, SchemaError
from referencing.jsonschema import DRAFT202012

DIRECTORY = Path(__file__).parent

# Bytes of a configured file: a schema, the tokens, a certificate, the pid.
MAX_FILE_LENGTH = 1024 * 1024
# Characters of a number literal: the time of its conversion grows with their square.
MAX_NUMBER_LENGTH = 1_000
# Levels of arrays and objects. jsonschema-rs takes 255, and the decoder what the stack
# of the interpreter permits, which differs from Python to Python.
MAX_LEVELS = 200
_NO_BRACKETS = re.compile(r'(?s)"(?:[^"\\]|\\.)*+"?|[^][{}"]+')
# Characters of the client's input that a message repeats.
MAX_SHOWN_LENGTH = 60

# Draft 2020-12 takes 1.0 for an integer, draft 4 does not. So a rule with the type
# integer refers to this schema: the only numbers that it accepts are integer literals.
_LITERAL_URI = 'urn:integer-literal'
_LITERAL = {
    '$schema': 'http://json-schema.org/draft-04/schema#',
    'type': ['integer', 'array', 'boolean', 'null', 'object', 'string'],
}

# Stands for the value in a message of jsonschema-rs, which would not cut a long one.
_MASK = '\0'


class NotJSON(Exception):
    """Bytes are not JSON text; the message says why."""


class Invalid(Exception):
    """A value breaks rules of a schema; the message names every fault."""


# NOTE: json.dumps() or json.loads() with arguments builds a new coder at each call.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def encode(value: Any) -> bytes:
    """Return a value as JSON text in UTF-8."""
    return _encode(value).encode()


def _is_deep(text: str) -> bool:
    """Whether more than MAX_LEVELS brackets are open at once, outside of strings."""
    brackets = _NO_BRACKETS.sub('', text)
    levels = accumulate(1 if each in '[{' else -1 for each in brackets)
    return any(level > MAX_LEVELS for level in levels)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise NotJSON(f'the member {show(twice)} is there more than once')
    return members


def _bounded(literal: str) -> str:
    if len(literal) > MAX_NUMBER_LENGTH:
        raise NotJSON(f'a number has more than {MAX_NUMBER_LENGTH} characters')
    return literal


def _float(literal: str) -> float:
    # The nearest finite number: JSON has no infinity.
    return max(-sys.float_info.max, min(float(_bounded(literal)), sys.float_info.max))


def _constant(literal: str) -> NoReturn:
    raise NotJSON(f'{literal} is not JSON')


_decode = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=lambda literal: int(_bounded(literal)),
    parse_float=_float,
    parse_constant=_constant,
).decode


class Schema:
    """The schema in ``{name}.json``, built once to check bodies.

    ``files`` is what ``load`` has returned. A schema that is wrong is a ``ValueError``.
    """

    def __init__(self, name: str, files: dict[str, Any]) -> None:
        files = deepcopy(files)
        for schema in files.values():
            for part in subschemas(schema):
                types = part.get('type', [])
                if 'integer' in types and 'number' not in types:
                    part['allOf'] = [*part.get('allOf', []), {'$ref': _LITERAL_URI}]
        files[_LITERAL_URI] = _LITERAL
        try:
            registry = jsonschema_rs.Registry(list(files.items()))
            self._validator = jsonschema_rs.Draft202012Validator(
                files[f'{name}.json'], registry=registry, offline=True, mask=_MASK
            )
        except (ValueError, jsonschema_rs.ReferencingError) as ex:
            path = DIRECTORY / f'{name}.json'
            raise ValueError(f'{path}: {getattr(ex, "message", ex)}') from ex

    def read(self, text: bytes) -> Any:
        """Return the value of JSON text, or raise ``NotJSON`` or ``Invalid``."""
        try:
            decoded = text.decode()
            if decoded.startswith('\ufeff'):
                raise NotJSON('it begins with a byte order mark')
            many = decoded.count('[') + decoded.count('{') > MAX_LEVELS
            if many and _is_deep(decoded):
                raise NotJSON(f'it is nested too deeply: more than {MAX_LEVELS} levels')
            value = _decode(decoded)
            if '\\u' in decoded:  # only an escape can make a lone surrogate
                encode(value)
            if self._validator.is_valid(value):
                return value
            # A schema may include two others that find the same fault.
            faults = dict.fromkeys(map(_describe, self._validator.iter_errors(value)))
        except UnicodeDecodeError as ex:
            raise NotJSON(f'byte {ex.start} is not UTF-8') from ex
        except UnicodeEncodeError as ex:
            raise NotJSON('a string holds a lone surrogate') from ex
        except json.JSONDecodeError as ex:
            raise NotJSON(f'{ex.msg.removesuffix(" at")} at character {ex.pos}') from ex
        raise Invalid('; '.join(faults))


def read_file(path: str | Path) -> bytes:
    """Return the content of a configured file: a regular one, or a link to one.

    Raises:
        OSError: It cannot be read.
        ValueError: It is a FIFO, a device or a directory, or longer than 1 MiB.
    """
    # NOTE: O_NONBLOCK, or the open of a FIFO waits until somebody else opens it.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 'rb') as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError('it is not a regular file')
        content = file.read(MAX_FILE_LENGTH + 1)
    if len(content) > MAX_FILE_LENGTH:
        raise ValueError(f'it is longer than {MAX_FILE_LENGTH} bytes')
    return content


def load() -> dict[str, Any]:
    """Check the schemas and return them, without $schema, by the names of their files.

    The sentence of a ``ValueError`` names the file that is not a JSON Schema.
    """
    files = {}
    for path in sorted(DIRECTORY.glob('*.json')):
        try:
            files[path.name] = schema = json.loads(read_file(path))
            if not isinstance(schema, dict):
                raise ValueError(f'{show(schema)} is not an object')
            Draft202012Validator.check_schema(schema)
            # With $schema each reference to this file might choose another draft.
            schema.pop('$schema', None)
        except (ValueError, SchemaError) as ex:
            raise ValueError(f'{path}: {getattr(ex, "message", ex)}') from ex
    return files


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it, at any depth; each may be changed."""
    if isinstance(schema, dict):
        yield schema
        for part in DRAFT202012.subresources_of(schema):
            yield from subschemas(part)


def _describe(error: jsonschema_rs.ValidationError) -> str:
    """Return a fault as a sentence for a person: ``id: 1.5 is not an integer``."""
    path = error.instance_path
    shown = show(error.instance)
    sentence = error.message.replace(_MASK, shown)
    rule: Any = error.kind.value
    match error.kind.name:
        case 'required':
            path, sentence = [*path, rule], 'is missing'
        case 'type' if len(rule) == 1 or set(rule) == set(_LITERAL['type']):
            type = rule[0] if len(rule) == 1 else 'integer'
            article = 'an' if type[0] in 'aio' else 'a'
            sentence = f'{shown} is not {article} {type}'
    return f'{".".join(map(str, path)) or "body"}: {_cut(sentence, 200)}'


def show(value: Any) -> str:
    """Return a value as JSON text that can be encoded, cut if it is long."""
    return _cut(json.dumps(value, ensure_ascii=False), MAX_SHOWN_LENGTH)


def _cut(text: str, length: int) -> str:
    text = text.encode(errors='backslashreplace').decode()
    return text if len(text) <= length else f'{text[:length]}...'
