"""The body of a request: strict JSON text, valid by the JSON Schema files.

The rules of the members are in ``schemas/`` (draft 2020-12) and nowhere else: edit a
file, reload, and the rule has changed. This module decides what RFC 8259 leaves open
about JSON text (``docs/api.md`` lists it).

jsonschema checks the files at the start. jsonschema-rs validates bodies with them: it
needs 1 us for a plant, jsonschema 50 to 80.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import jsonschema_rs
from jsonschema import Draft202012Validator, SchemaError

from store import Plant, check_plant

DIRECTORY = Path(__file__).parent.parent / 'schemas'
MAX_SHOWN_LENGTH = 60  # characters of the client's input that a message repeats
LARGEST = float.fromhex('0x1.fffffffffffffp+1023')

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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise NotJSON(f'the member {show(twice)} is there more than once')
    return members


def _float(literal: str) -> float:
    # The nearest finite number: JSON has no infinity.
    return max(-LARGEST, min(float(literal), LARGEST))


def _constant(literal: str) -> NoReturn:
    raise NotJSON(f'{literal} is not JSON')


_decode = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_constant=_constant
).decode


class Schema:
    """The schema in ``{name}.json``, built once to check bodies.

    ``files`` is what ``load_schemas`` has returned.

    Raises:
        ValueError: The schema is wrong.
    """

    def __init__(self, name: str, files: dict[str, Any]) -> None:
        try:
            registry = jsonschema_rs.Registry(list(files.items()))
            self._validator = jsonschema_rs.Draft202012Validator(
                files[f'{name}.json'], registry=registry, offline=True, mask=_MASK
            )
        except (KeyError, ValueError, jsonschema_rs.ReferencingError) as ex:
            path = DIRECTORY / f'{name}.json'
            raise ValueError(f'{path}: {getattr(ex, "message", ex)}') from ex

    def read(self, text: bytes) -> Any:
        """Return the value of JSON text.

        Raises:
            NotJSON: It is none, or has more levels or digits than Python takes.
            Invalid: It breaks the rules of the schema.
        """
        try:
            decoded = text.decode()
            if decoded.startswith('\ufeff'):
                raise NotJSON('it begins with a byte order mark')
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
        except (RecursionError, ValueError) as ex:
            raise NotJSON('it has too many levels, or a number too many digits') from ex
        raise Invalid('; '.join(faults))


def read_plant(text: bytes, schema: Schema) -> Plant:
    """Return the plant of a body that the schema accepts; raises as ``Schema.read``."""
    value = schema.read(text)
    plant = Plant(*map(value.get, Plant._fields))
    try:
        check_plant(plant)  # a JSON Schema takes 1.0 for an integer
    except ValueError as ex:
        raise Invalid(str(ex)) from ex
    return plant


def load_schemas() -> dict[str, Any]:
    """Check the schemas and return them, without $schema, by the names of their files.

    Raises:
        ValueError: A file is not a JSON Schema; the sentence names it.
    """
    files = {}
    for path in sorted(DIRECTORY.glob('*.json')):
        try:
            files[path.name] = schema = json.loads(path.read_bytes())
            if not isinstance(schema, dict):
                raise ValueError(f'{show(schema)} is not an object')
            Draft202012Validator.check_schema(schema)
            # With $schema each reference to this file might choose another draft.
            schema.pop('$schema', None)
        except (OSError, ValueError, SchemaError) as ex:
            raise ValueError(f'{path}: {getattr(ex, "message", ex)}') from ex
    return files


def _describe(error: jsonschema_rs.ValidationError) -> str:
    """Return a fault as a sentence for a person: ``id: 1.5 is not an integer``."""
    path = error.instance_path
    shown = show(error.instance)
    sentence = error.message.replace(_MASK, shown)
    rule: Any = error.kind.value
    match error.kind.name:
        case 'required':
            path, sentence = [*path, rule], 'is missing'
        case 'type' if len(rule) == 1:
            article = 'an' if rule[0][0] in 'aio' else 'a'
            sentence = f'{shown} is not {article} {rule[0]}'
    return f'{".".join(map(str, path)) or "body"}: {_cut(sentence, 200)}'


def show(value: Any) -> str:
    """Return a value as JSON text that can be encoded, cut if it is long."""
    return _cut(json.dumps(value, ensure_ascii=False), MAX_SHOWN_LENGTH)


def _cut(text: str, length: int) -> str:
    text = text.encode(errors='backslashreplace').decode()
    return text if len(text) <= length else f'{text[:length]}...'
