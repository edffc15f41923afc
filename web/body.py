"""The body of a request: strict JSON text, valid by the JSON Schema files.

The rules of the members are in ``schemas/`` (draft 2020-12) and nowhere else. There
jsonschema checks the files, jsonschema-rs the bodies: in 1 us, not 50 to 80.
"""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import falcon
import jsonschema_rs
from jsonschema import Draft202012Validator, FormatChecker

from store import Plant, check_plant
from store.base import OPTIONAL, TEXTS, to_json
from web.errors import ErrorValue, Fault

DIRECTORY = Path(__file__).parent.parent / 'schemas'
# With look-around a pattern may take 2,000 steps: half a second for a text of 60 KB.
# In the 10 MiB of the default there is no room for the rule of a name, \p{L}{1,255}.
PATTERNS = jsonschema_rs.FancyRegexOptions(2_000, size_limit=16 * 2**20)
FAULTS = 100  # of a body that are told: thousands of an array would take half a second
# Stands for the value in a message of jsonschema-rs, which would not cut a long one.
_MASK = '\0'
# A plant without faults, whose members can be replaced one at a time.
_SOUND = Plant._make([0, *('' for _ in TEXTS)])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f'the member {_cut(ascii(twice))} is there more than once')
    return members


def _constant(literal: str) -> NoReturn:
    raise ValueError(f'{literal} is not a number of JSON')


# NOTE: prebuilt, since json.loads() with arguments builds a decoder at each call.
_decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant).decode


class PlantReader:
    """Reads the plant in a body of at most ``limit`` bytes by the schema files."""

    def __init__(self, limit: int) -> None:
        """Read the files, none that is hidden; a ``ValueError`` names a bad one."""
        paths = sorted({DIRECTORY / 'NewPlant.json', *DIRECTORY.glob('[!.]*.json')})
        self._limit = limit
        self.files: dict[str, Any] = {}  # by name; the description has them, too
        rules = {}
        try:
            for path in paths:
                schema = json.loads(path.read_bytes(), object_pairs_hook=_object)
                self.files[path.name] = schema = {**schema}
                # Without its patterns, which the engine that runs them must know.
                Draft202012Validator.check_schema(schema, FormatChecker(()))
                schema.pop('$schema', None)  # else a reference might follow another
                if DIRECTORY / schema.get('$id', '') in paths:
                    schema['$id'] = path.name  # a copy has that of its original
            path = DIRECTORY  # a reference of any of them may lead nowhere
            registry = jsonschema_rs.Registry(list(self.files.items()))
            # Each is checked alone, and Plant.json before the file that includes it.
            for path in reversed(paths):
                schema = self.files[path.name]
                rules[path.name] = jsonschema_rs.Draft202012Validator(
                    schema, registry=registry, mask=_MASK, pattern_options=PATTERNS
                )
        except Exception as ex:
            told = _describe(ex) if hasattr(ex, 'kind') else getattr(ex, 'message', ex)
            raise ValueError(f'{path}: {told}') from ex
        self._schema = rules['NewPlant.json']

    def read(self, req: falcon.Request) -> Plant:
        """Return the plant of a request, or raise ``Fault``."""
        try:
            text = _read_body(req, self._limit).decode()
            value = _decode(text)
            if '\\u' in text:  # only an escape can make a lone surrogate
                to_json(value).encode()
            if self._schema.is_valid(value) and isinstance(value, dict):
                plant = Plant(*map(value.get, Plant._fields))  # type: ignore[arg-type]
                try:
                    check_plant(plant)
                    return plant
                except ValueError:  # it says one fault of perhaps several
                    pass
            faults = self._faults(value)
        except (RecursionError, ValueError) as ex:  # too deep, too many digits, no JSON
            is_text = not isinstance(ex, UnicodeDecodeError)
            reason = str(ex).partition(';')[0] if is_text else 'it is not UTF-8'
            if getattr(ex, 'doc', '').startswith('\ufeff'):
                reason = 'it begins with a byte order mark'
            raise Fault(ErrorValue.NOT_JSON, f'the body is not JSON: {reason}') from ex
        raise Fault(ErrorValue.NOT_A_NEW_PLANT, '; '.join(faults))

    def _faults(self, value: Any) -> dict[str, None]:
        """Return a sentence for each fault; ``Plant`` knows some that no schema has."""
        # A schema may include two others that find the same fault.
        found = islice(self._schema.iter_errors(value), FAULTS)
        faults = dict.fromkeys(map(_describe, found))
        if not isinstance(value, dict):  # an edited schema may take anything
            return faults or {'body: it is not an object': None}
        named = {fault.partition(':')[0] for fault in faults}
        for member in [each for each in Plant._fields if each not in named]:
            alone: Any = {member: value.get(member)}
            try:  # to a JSON Schema 2.0 is an integer
                check_plant(_SOUND._replace(**alone))
            except ValueError as ex:
                faults[str(ex)] = None
        return faults


def _read_body(req: falcon.Request, limit: int) -> bytearray:
    chunked = 'HTTP_TRANSFER_ENCODING' in req.env
    # RFC 9112, section 6.3: then Content-Length is ignored; the server marks the end.
    length = 0 if chunked else req.content_length or 0
    if not (req.env.get('wsgi.input_terminated') if chunked else length):
        raise Fault(ErrorValue.BODY_MISSING, 'the body is empty, or has no length')
    media, charset = req.content_type or '', 'utf8'
    if media != falcon.MEDIA_JSON:
        media, parameters = falcon.parse_header(media)
        charset = parameters.get('charset', charset).lower().replace('utf-8', 'utf8')
    coding = req.env.get('HTTP_CONTENT_ENCODING', 'identity').lower()
    if (media.lower(), charset, coding) != (falcon.MEDIA_JSON, 'utf8', 'identity'):
        needed = 'the body must be application/json in UTF-8, without Content-Encoding'
        raise Fault(ErrorValue.WRONG_MEDIA_TYPE, needed)
    body = bytearray()
    size = 0 if length > limit else length or limit + 1
    try:
        # NOTE: a read may return fewer bytes than it was asked for before the end.
        while len(body) < size and (piece := req.stream.read(size - len(body))):
            body += piece
    except Exception as ex:  # bad chunks, or no client; each server has its own kinds
        raise Fault(ErrorValue.BAD_REQUEST, 'the body could not be read') from ex
    if max(length, len(body)) > limit:
        raise Fault(ErrorValue.BODY_TOO_LARGE, f'the body is larger than {limit} bytes')
    if len(body) < length:
        raise Fault(ErrorValue.BAD_REQUEST, f'the body ended after {len(body)} bytes')
    if not body:
        raise Fault(ErrorValue.BODY_MISSING, 'the body is empty')
    return body


def _describe(error: Any) -> str:
    """Return a fault as a sentence for a person: ``id: 1.5 is not an integer``."""
    path, rule = error.instance_path, error.kind.value
    shown = _cut(json.dumps(error.instance, ensure_ascii=False))
    sentence = error.message.replace(_MASK, shown)
    match error.kind.name:
        case 'required':
            path, sentence = [*path, rule], 'is missing'
        case 'type' if len(rule) == 1:
            article = 'an' if rule[0][0] in 'aio' else 'a'
            sentence = f'{shown} is not {article} {rule[0]}'
            if shown == 'null' and path and OPTIONAL.issuperset(path):
                sentence += ': leave it out'
    return _cut(f'{".".join(map(str, path)) or "body"}: {sentence}', 200)


def _cut(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f'{text[:length]}...'
