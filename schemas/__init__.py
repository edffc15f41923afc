"""JSON text and JSON Schema: read a body strictly, validate it, describe its faults.

The rules of the members are in the JSON Schema files beside this module (draft 2020-12)
and nowhere else: edit a file, reload, and the rule has changed. This module decides
what RFC 8259 leaves open about JSON text.

Two libraries read the files. jsonschema-rs decides whether a value is valid: it needs
1 us for a plant, jsonschema 50 to 80. jsonschema checks the files at the start, and
describes the faults of a value that was refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jsonschema_rs
from jsonschema import Draft202012Validator, SchemaError, ValidationError
from referencing import Registry
from referencing.jsonschema import DRAFT202012

DIRECTORY = Path(__file__).parent

# Characters of a number literal: far more than any use needs, and far fewer than make
# its conversion slow, which takes time with the square of the length.
MAX_NUMBER_LENGTH = 1_000
# Characters of the client's input that a message repeats.
MAX_SHOWN_LENGTH = 60

_SURROGATE_ESCAPE = re.compile(r'\\u[dD][89a-fA-F]')

# Draft 2020-12 takes 1.0 for an integer, draft 4 does not. So a rule with the type
# integer gets a reference to this schema, which accepts what is no number or an integer
# literal.
_LITERAL_URI = 'urn:integer-literal'
_LITERAL = {
    '$schema': 'http://json-schema.org/draft-04/schema#',
    'type': ['integer', 'array', 'boolean', 'null', 'object', 'string'],
}


class NotJSON(ValueError):
    """Bytes are not JSON text; the message says why."""


class Invalid(ValueError):
    """A value breaks rules of a schema; the message names every fault."""


# NOTE: built once: json.dumps() with arguments builds one at every call.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def encode(value: Any) -> bytes:
    """Return a value as JSON text in UTF-8."""
    return _encode(value).encode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(n for n, _ in pairs if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        raise NotJSON(f'the member {show(twice)} is there twice')
    return members


def _bounded(literal: str) -> str:
    if len(literal) > MAX_NUMBER_LENGTH:
        raise NotJSON(f'a number has more than {MAX_NUMBER_LENGTH} characters')
    return literal


def _float(literal: str) -> float:
    # The nearest one: JSON has no infinity.
    return max(-sys.float_info.max, min(float(_bounded(literal)), sys.float_info.max))


def _constant(literal: str) -> NoReturn:
    raise NotJSON(f'{literal} is not JSON')


# NOTE: built once: json.loads() with arguments builds one at every call.
_decode = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=lambda literal: int(_bounded(literal)),
    parse_float=_float,
    parse_constant=_constant,
).decode


def parse(text: bytes) -> Any:
    """Return the value of JSON text, read strictly.

    It is stricter than ``json.loads``: UTF-8 without a byte order mark, no NaN and
    Infinity, no member name twice in an object, no lone surrogate, no number literal
    of more than ``MAX_NUMBER_LENGTH`` characters. The stack of the interpreter bounds
    nesting, at some hundreds of levels.

    Raises:
        NotJSON: The text is not such JSON.
    """
    try:
        decoded = text.decode()
        if decoded.startswith('\ufeff'):
            raise NotJSON('it begins with a byte order mark')
        value = _decode(decoded)
        if _SURROGATE_ESCAPE.search(decoded):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as ex:
        raise NotJSON(f'byte {ex.start} is not UTF-8') from ex
    except UnicodeEncodeError as ex:
        raise NotJSON('a string holds a lone surrogate') from ex
    except RecursionError as ex:
        raise NotJSON('it is nested too deeply') from ex
    except json.JSONDecodeError as ex:
        message = ex.msg.removesuffix(' at')
        raise NotJSON(f'{message} at character {ex.pos}') from ex
    return value


class Schema:
    """A schema, ready to check values; build it once.

    Args:
        name: The name of the file without ``.json``.

    Raises:
        ValueError: A file is not a JSON Schema; the message is a sentence.
    """

    def __init__(self, name: str) -> None:
        files = load()
        for schema in files.values():
            # It would choose another draft at each reference to this file.
            schema.pop('$schema', None)
            _require_literals(schema)
        files[_LITERAL_URI] = _LITERAL
        schema = files[f'{name}.json']
        registry: Registry[Any] = Registry().with_resources(
            (uri, DRAFT202012.create_resource(file)) for uri, file in files.items()
        )
        self._describing = Draft202012Validator(schema, registry=registry)
        try:
            self._deciding = jsonschema_rs.Draft202012Validator(
                schema,
                registry=jsonschema_rs.Registry(list(files.items())),
                offline=True,
                mask='it',  # stands for the value in its messages
            )
        except (ValueError, jsonschema_rs.ReferencingError) as ex:
            reason = getattr(ex, 'message', ex)
            raise ValueError(f'{DIRECTORY / name}.json: {reason}') from ex

    def read(self, text: bytes) -> Any:
        """Return the value of JSON text, which must keep the rules of the schema.

        Raises:
            NotJSON: The text is not JSON.
            Invalid: Its value breaks rules of the schema.
        """
        value = parse(text)
        try:
            if self._deciding.is_valid(value):
                return value
        except ValueError as ex:  # rules that compare values have a limit of their own
            raise NotJSON('it is nested too deeply') from ex
        raise Invalid('; '.join(self._faults(value)))

    def _faults(self, value: Any) -> list[str]:
        """Return every fault of an invalid value, as sentences for a person.

        Each sentence names the member and the rule: ``id: 1.5 is not an integer``.
        """
        faults: list[str] = []
        # It may fail where the other one does not: a value is too deep or too large for
        # it, for example. The value is refused all the same, with other words.
        with suppress(Exception):
            for error in self._describing.iter_errors(value):
                faults += _describe(error)
        if not faults:
            # The two differ in corners: dialects of patterns, rounding in multipleOf.
            with suppress(ValueError):  # the value is nested too deeply for it, too
                faults = [
                    f'{_where(ex.instance_path)}: {_cut(ex.message, 200)}'
                    for ex in self._deciding.iter_errors(value)
                ]
        # A schema may include two others that find the same fault.
        return list(dict.fromkeys(faults)) or ['body: it is nested too deeply']


def load() -> dict[str, Any]:
    """Read and check the schemas; return them by the names of their files.

    Raises:
        ValueError: A file is not a JSON Schema; the message is a sentence.
    """
    files = {}
    for path in sorted(DIRECTORY.glob('*.json')):
        try:
            files[path.name] = schema = json.loads(path.read_bytes())
            if not isinstance(schema, dict):
                raise ValueError(f'{show(schema)} is not an object')
            Draft202012Validator.check_schema(schema)
        except (ValueError, SchemaError) as ex:
            reason = ex.message if isinstance(ex, SchemaError) else ex
            raise ValueError(f'{path}: {reason}') from ex
    return files


def _require_literals(schema: Any) -> None:
    """Have the rules in a schema accept only literals as integers, in place."""
    if isinstance(schema, dict):
        types = schema.get('type', [])
        if 'integer' in types and 'number' not in types:
            schema['allOf'] = [*schema.get('allOf', []), {'$ref': _LITERAL_URI}]
        for part in DRAFT202012.subresources_of(schema):
            _require_literals(part)


_BREAKS = {
    'minimum': 'is less than',
    'maximum': 'is greater than',
    'pattern': 'does not match',
}


def _describe(error: ValidationError) -> Iterator[str]:
    where = _where(error.absolute_path)
    rule: Any = error.validator_value
    instance: Any = error.instance
    match error.validator:
        case 'required':
            for name in [name for name in rule if name not in instance]:
                yield f'{_where([*error.absolute_path, name])}: is missing'
        case 'type' if isinstance(rule, str) or rule == _LITERAL['type']:
            type = rule if isinstance(rule, str) else 'integer'
            article = 'an' if type[0] in 'aio' else 'a'
            yield f'{where}: {show(instance)} is not {article} {type}'
        case None:  # the schema is false
            yield f'{where}: {show(instance)} is not allowed'
        case name:
            breaks = _BREAKS.get(str(name), f'breaks {name}')
            yield f'{where}: {show(instance)} {breaks} {show(rule)}'


def _where(path: Iterable[str | int]) -> str:
    """Return the path of a member; an empty path is the body."""
    return '.'.join(map(str, path)) or 'body'


def show(value: Any) -> str:
    """Return a value as JSON text that can be encoded, cut if it is long."""
    return _cut(json.dumps(value, ensure_ascii=False), MAX_SHOWN_LENGTH)


def _cut(text: str, length: int) -> str:
    text = text.encode(errors='backslashreplace').decode()
    return text if len(text) <= length else f'{text[:length]}...'
