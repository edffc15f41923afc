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

import falcon
import jsonschema_rs
from jsonschema import Draft202012Validator, SchemaError

from store import Plant, check_plant
from web.errors import ErrorValue, Fault
from web.request import PlantsRequest

DIRECTORY = Path(__file__).parent.parent / 'schemas'
MAX_SHOWN_LENGTH = 60  # characters of the client's input that a message repeats

# Stands for the value in a message of jsonschema-rs, which would not cut a long one.
_MASK = '\0'


class _NotJSON(ValueError):
    """Bytes are not JSON text; the message says why."""


# NOTE: json.dumps() or json.loads() with arguments builds a new coder at each call.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def encode(value: Any) -> bytes:
    """Return a value as JSON text in UTF-8."""
    return _encode(value).encode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _NotJSON(f'the member {show(twice)} is there more than once')
    return members


def _constant(literal: str) -> NoReturn:
    raise _NotJSON(f'{literal} is not JSON')


_decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant).decode


class Schema:
    """The schema in ``{name}.json`` of the files of ``load_schemas``, built once.

    Raises:
        ValueError: It is wrong.
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
        """Return the value of JSON text, or raise ``Fault``."""
        try:
            value = _parse(text)
            if self._validator.is_valid(value):
                return value
            # A schema may include two others that find the same fault.
            faults = dict.fromkeys(map(_describe, self._validator.iter_errors(value)))
        except _NotJSON as ex:
            raise Fault(ErrorValue.NOT_JSON, f'the body is not JSON: {ex}') from ex
        except (RecursionError, ValueError) as ex:
            reason = 'it has too many levels, or a number too many digits'
            raise Fault(ErrorValue.NOT_JSON, f'the body is not JSON: {reason}') from ex
        raise Fault(ErrorValue.NOT_A_NEW_PLANT, '; '.join(faults))


def _parse(text: bytes) -> Any:
    try:
        decoded = text.decode()
        if decoded.startswith('\ufeff'):
            raise _NotJSON('it begins with a byte order mark')
        value = _decode(decoded)
        if '\\u' in decoded:  # only an escape can make a lone surrogate
            encode(value)
    except UnicodeDecodeError as ex:
        raise _NotJSON(f'byte {ex.start} is not UTF-8') from ex
    except UnicodeEncodeError as ex:
        raise _NotJSON('a string holds a lone surrogate') from ex
    except json.JSONDecodeError as ex:
        raise _NotJSON(f'{ex.msg.removesuffix(" at")} at character {ex.pos}') from ex
    return value


def read_plant(req: PlantsRequest, schema: Schema, limit: int) -> Plant:
    """Return the plant in a body of at most ``limit`` bytes, or raise ``Fault``."""
    value = schema.read(_read_body(req, limit))
    plant = Plant(*map(value.get, Plant._fields))
    try:
        check_plant(plant)  # a JSON Schema takes 1.0 for an integer
    except ValueError as ex:
        raise Fault(ErrorValue.NOT_A_NEW_PLANT, str(ex)) from ex
    return plant


def _read_body(req: PlantsRequest, limit: int) -> bytes:
    # RFC 9112, section 6.3: with a transfer coding, Content-Length is ignored. Then the
    # server must mark the end of the body in the input.
    chunked = 'HTTP_TRANSFER_ENCODING' in req.env
    length = 0 if chunked else req.content_length or 0
    is_there = req.env.get('wsgi.input_terminated') if chunked else length
    if not is_there:
        raise Fault(ErrorValue.BODY_MISSING, 'the body is missing: send its length')
    if fault := _media_type_fault(req):
        raise Fault(ErrorValue.WRONG_MEDIA_TYPE, fault)
    body = b'' if length > limit else _read_up_to(req, length or limit + 1)
    if max(length, len(body)) > limit:
        raise Fault(ErrorValue.BODY_TOO_LARGE, f'the body is larger than {limit} bytes')
    if len(body) < length:
        ended = f'the body ended after {len(body)} of {length} bytes'
        raise Fault(ErrorValue.BAD_REQUEST, ended)
    if not body:
        raise Fault(ErrorValue.BODY_MISSING, 'the body is empty')
    return body


def _read_up_to(req: PlantsRequest, size: int) -> bytes:
    pieces = []
    try:
        # NOTE: a read may return fewer bytes than it was asked for before the end.
        while size and (piece := req.stream.read(size)):
            pieces.append(piece)
            size -= len(piece)
    except Exception as ex:
        # Bad chunks, or the client is gone. Each server raises exceptions of its own.
        raise Fault(ErrorValue.BAD_REQUEST, 'the body could not be read') from ex
    return b''.join(pieces)


def _media_type_fault(req: PlantsRequest) -> str:
    """Return what is wrong with the media type, or nothing."""
    content_type, parameters = falcon.parse_header(req.content_type or '')
    if content_type.lower() != falcon.MEDIA_JSON:
        return 'the Content-Type must be application/json'
    charset = parameters.get('charset', 'utf-8')
    if charset.lower() not in ('utf-8', 'utf8'):
        return f'the charset must be utf-8, not {show(charset)}'
    if req.env.get('HTTP_CONTENT_ENCODING', 'identity').lower() != 'identity':
        return 'the body must not have a Content-Encoding'
    return ''


def load_schemas() -> dict[str, Any]:
    """Return the schemas, without $schema, by the names of their files.

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
