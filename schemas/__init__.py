"""JSON text and JSON Schema: read a body strictly, validate it, describe its faults.

The rules of the members are in the JSON Schema files beside this module (draft 2020-12)
and nowhere else: edit a file, reload, and the rule has changed. This module decides
what RFC 8259 leaves open about JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jsonschema_rs
from jsonschema import (
    Draft4Validator,
    Draft202012Validator,
    SchemaError,
    ValidationError,
)
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

DIRECTORY = Path(__file__).parent

# Characters of a number literal: far more than any use needs, and far fewer than make
# its conversion slow, which takes time with the square of the length.
MAX_NUMBER_LENGTH = 1_000
# Characters of the client's input that a message repeats.
MAX_SHOWN_LENGTH = 60

_SURROGATE_ESCAPE = re.compile(r'\\u[dD][89a-fA-F]')


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


def _constant(literal: str) -> NoReturn:
    raise NotJSON(f'{literal} is not JSON')


class _FloatFound(Exception):
    """A number literal has a fraction or an exponent."""


def _no_float(literal: str) -> NoReturn:
    raise _FloatFound


def _decoder(parse_float: Callable[[str], Any]) -> Callable[[str], Any]:
    # NOTE: built once: json.loads() with arguments builds one at every call.
    return json.JSONDecoder(
        object_pairs_hook=_object,
        parse_int=lambda literal: int(_bounded(literal)),
        parse_float=parse_float,
        parse_constant=_constant,
    ).decode


_decode = _decoder(lambda literal: float(_bounded(literal)))
_decode_without_floats = _decoder(_no_float)


def parse(text: bytes, decode: Callable[[str], Any] = _decode) -> Any:
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
        value = decode(decoded)
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


# An integer is an integer literal, as in draft 4: later drafts accept 1.0, too.
# NOTE: not redefine() with a function of ours. The object that would hold the function
# is invisible to Python's garbage collector: a reload could never free this module.
_Validator: type[Draft202012Validator] = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, type_checker=Draft4Validator.TYPE_CHECKER
)


# One validator reads patterns as Python does, the other one as ECMA 262 says. These
# patterns mean the same in both.
_AGREED_PATTERNS = {r'^[^\u0000]*$'}


class Schema:
    """A schema, ready to check values; build it once.

    Two validators read the same files. The fast one, jsonschema-rs, accepts nearly all
    valid values, a hundred times as fast. All others go to the slow one, jsonschema,
    which decides and describes the faults. The fast one is not asked where the two may
    disagree: for a value with a float, since it takes 1.0 for an integer; and never if
    a schema has a pattern that we do not know, or a float, which it rounds otherwise.

    Args:
        name: The name of the file without ``.json``.

    Raises:
        ValueError: A file is not a JSON Schema; the message is a sentence.
    """

    def __init__(self, name: str) -> None:
        # Without $schema, which would choose another class than ours at each $ref.
        files = {
            file: {name: rule for name, rule in schema.items() if name != '$schema'}
            for file, schema in load().items()
        }
        schema = files[f'{name}.json']
        self._validator = _Validator(schema, registry=_registry(files))
        self._is_valid: Callable[[Any], bool] = lambda value: False
        if _validators_agree(list(files.values())):
            self._is_valid = jsonschema_rs.Draft202012Validator(
                schema, registry=jsonschema_rs.Registry(list(files.items()))
            ).is_valid

    def read(self, text: bytes) -> Any:
        """Return the value of JSON text, which must keep the rules of the schema.

        Raises:
            NotJSON: The text is not JSON.
            Invalid: Its value breaks rules of the schema.
        """
        try:
            value = parse(text, _decode_without_floats)
            if self._is_valid(value):
                return value
        except _FloatFound:
            value = parse(text)
        try:
            faults = self.faults(value)
        except RecursionError as ex:
            raise NotJSON('it is nested too deeply') from ex
        except OverflowError as ex:  # jsonschema divides for multipleOf
            raise Invalid('body: a number is too large') from ex
        if faults:
            raise Invalid('; '.join(faults))
        return value

    def faults(self, value: Any) -> list[str]:
        """Return every fault of a value, as a sentence for a person.

        Each sentence names the member and the rule: ``id: 1.5 is not an integer``.
        """
        errors = self._validator.iter_errors(value)
        # A schema may include two others that find the same fault.
        return list(dict.fromkeys(fault for ex in errors for fault in _describe(ex)))


def load() -> dict[str, Any]:
    """Read the schemas; return them by the names of their files.

    Raises:
        ValueError: A file is not a JSON Schema; the message is a sentence.
    """
    files = {}
    for path in sorted(DIRECTORY.glob('*.json')):
        try:
            files[path.name] = schema = json.loads(path.read_bytes())
            if not isinstance(schema, dict):
                raise ValueError(f'{show(schema)} is not an object')
            _Validator.check_schema(schema)
            for pattern in _patterns(schema):
                re.compile(pattern)
        except (ValueError, re.error, SchemaError) as ex:
            reason = ex.message if isinstance(ex, SchemaError) else ex
            raise ValueError(f'{path}: {reason}') from ex
    registry = _registry(files)
    for file, schema in files.items():
        try:
            _check_references(schema, registry.resolver(file))
        except Unresolvable as ex:
            reason = f'the reference {show(ex.ref)} leads nowhere'
            raise ValueError(f'{DIRECTORY / file}: {reason}') from ex
    return files


def _registry(files: dict[str, Any]) -> Registry[Any]:
    registry: Registry[Any] = Registry()
    return registry.with_resources(
        (file, DRAFT202012.create_resource(schema)) for file, schema in files.items()
    )


def _check_references(schema: Any, resolver: Any) -> None:
    """Resolve each reference in a schema.

    Raises:
        Unresolvable: A reference leads nowhere.
    """
    resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
    if isinstance(schema, dict):
        for keyword in {'$ref', '$dynamicRef'} & schema.keys():
            resolver.lookup(schema[keyword])
    for part in DRAFT202012.subresources_of(schema):
        _check_references(part, resolver)


def _patterns(schema: Any) -> Iterator[str]:
    """Yield the regular expressions in a schema, wherever they are."""
    if isinstance(schema, dict):
        if isinstance(pattern := schema.get('pattern'), str):
            yield pattern
        if isinstance(properties := schema.get('patternProperties'), dict):
            yield from properties
    if isinstance(schema, dict | list):
        for part in schema.values() if isinstance(schema, dict) else schema:
            yield from _patterns(part)


def _validators_agree(schemas: list[Any]) -> bool:
    """Whether both validators are known to read the schemas in the same way."""
    try:
        _decode_without_floats(json.dumps(schemas))
    except (_FloatFound, NotJSON):  # NotJSON: Infinity, for example
        return False
    return _AGREED_PATTERNS.issuperset(_patterns(schemas))


_BREAKS = {
    'minimum': 'is less than',
    'maximum': 'is greater than',
    'pattern': 'does not match',
}


def _describe(error: ValidationError) -> Iterator[str]:
    path = '.'.join(map(str, error.absolute_path))
    where = path or 'body'
    rule: Any = error.validator_value
    instance: Any = error.instance
    match error.validator:
        case 'required':
            for name in rule:
                if name not in instance:
                    yield f'{path}.{name}: is missing'.lstrip('.')
        case 'type' if isinstance(rule, str):
            article = 'an' if rule[0] in 'aio' else 'a'
            yield f'{where}: {show(instance)} is not {article} {rule}'
        case name:
            breaks = _BREAKS.get(str(name), f'breaks {name}')
            yield f'{where}: {show(instance)} {breaks} {show(rule)}'


def show(value: Any) -> str:
    """Return a value as JSON text that can be encoded, cut if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    text = text.encode(errors='backslashreplace').decode()
    return text if len(text) <= MAX_SHOWN_LENGTH else f'{text[:MAX_SHOWN_LENGTH]}...'
