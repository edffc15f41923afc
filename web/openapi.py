"""The description of the interface (OpenAPI 3.1): ``openapi.json``, completed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from referencing.jsonschema import DRAFT202012

import schemas
from store import __version__

# A reference to another file, to a place in it, or to a place in the same file. An
# anchor (#name) does not match: it is found anywhere in a document.
_REFERENCE = re.compile(r'(?:([A-Za-z0-9._-]+)\.json)?(?:#(/.*)?)?')


def describe(max_body_bytes: int, *, metrics: bool = False) -> dict[str, Any]:
    """Return the description of a service.

    The URL of the service in it is relative to that of the description (OpenAPI 3.1.0,
    section 4.8.5). So it is right under any prefix, also under one that a proxy removes
    without a header, and it trusts no host and no scheme that a request claims.

    Args:
        max_body_bytes: The longest body that the service reads.
        metrics: Whether ``/metrics`` is served.

    Raises:
        ValueError: A file is not a JSON Schema; the message is a sentence.
    """
    description: dict[str, Any] = json.loads(
        Path(__file__).with_suffix('.json').read_bytes()
    )
    description['info']['version'] = __version__
    description['components']['schemas'] = _schemas()
    body = description['paths']['/plants']['post']['requestBody']
    body['description'] = body['description'].format(max_body_bytes=max_body_bytes)
    if not metrics:
        del description['paths']['/metrics']
    return description


def _schemas() -> dict[str, Any]:
    """Return the files as components, with their references pointing to components.

    NOTE: an ``$id`` would be a base for references. Without it they mean the same to
    tools that know JSON Schema and to those that know only OpenAPI.
    """
    components = {}
    for file, schema in schemas.load().items():
        name = file.removesuffix('.json')
        _move_references(schema, name)
        components[name] = {
            rule: value
            for rule, value in schema.items()
            if rule not in {'$schema', '$id'}
        }
    return components


def _move_references(schema: Any, name: str) -> None:
    """Point the references of a schema to the components, in place.

    Args:
        schema: A schema, or a part of one at any depth.
        name: The name of its file, without ``.json``.
    """
    if isinstance(schema, dict):
        match = _REFERENCE.fullmatch(schema.get('$ref', '#none'))
        if match:
            file, pointer = match.groups(default='')
            schema['$ref'] = f'#/components/schemas/{file or name}{pointer}'
        for part in DRAFT202012.subresources_of(schema):
            _move_references(part, name)
