"""The description of the interface (OpenAPI 3.1), made of what is written elsewhere.

The shapes are the files beside this module; the errors are those of the application.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from referencing.jsonschema import DRAFT202012

import schemas
from web import VERSION

# To a file, to a place in it, or to a place in the file where it stands. An anchor
# (#name) is the same everywhere in a document.
_REFERENCE = re.compile(r'(?:([A-Za-z0-9._-]+)\.json)?(?:#(/.*)?)?')

_HEADERS: dict[str, Any] = {
    'X-Request-Id': {
        'description': 'What the log calls the request: the header of this name that '
        'it had, or a new id. Missing if the HTTP server could not read the request.',
        'schema': {'type': 'string'},
    },
    'WWW-Authenticate': {
        'description': 'The challenge of RFC 6750.',
        'required': True,
        'schema': {'type': 'string', 'pattern': '^Bearer'},
    },
    'Retry-After': {
        'description': 'After how many seconds to try again.',
        'required': True,
        'schema': {'type': 'integer', 'minimum': 1},
    },
    'Allow': {
        'description': 'With 405, the methods that are allowed.',
        'schema': {'type': 'string'},
    },
}


def describe(
    errors: Mapping[int, str], max_body_bytes: int, *, metrics: bool = False
) -> dict[str, Any]:
    """Return the description of a service.

    Args:
        errors: What each ``error`` of an ``Error`` means, in words for a person.
        max_body_bytes: The longest body that the service reads.
        metrics: Whether ``/metrics`` is served.

    Raises:
        ValueError: A file is not a JSON Schema; the message is a sentence.
    """
    responses = {
        '400': _error(errors, 400),
        '401': _error(errors, 401, 'WWW-Authenticate'),
        '500': _error(errors, 500),
        '503': _error(errors, 503, 'Retry-After'),
    }
    others = {
        value: meaning
        for value, meaning in errors.items()
        if str(value // 100) not in responses
    }
    return {
        'openapi': '3.1.0',
        'info': {
            'title': 'Plant store',
            'description': 'A plant that was answered with 200 is never lost.',
            'version': VERSION,
            'license': {'name': 'MIT', 'identifier': 'MIT'},
        },
        # Relative to where the description was found (OpenAPI 3.1.0, section 4.8.5). It
        # is right under any prefix, also under one that a proxy takes away and does not
        # tell, and it believes no host and no scheme that a request only claims.
        'servers': [{'url': '.', 'description': 'this service'}],
        'security': [{'token': []}],
        'paths': {
            '/plants': {
                'post': {
                    'operationId': 'addPlant',
                    'tags': ['Plants'],
                    'summary': 'Add a plant',
                    'description': 'The same plant again is answered in the same way '
                    'and stored once, so a request whose answer was lost may be sent '
                    'again. A different plant with a taken `id` is refused.',
                    'requestBody': {
                        'description': f'At most {max_body_bytes} bytes.',
                        'required': True,
                        'content': _json(_component('NewPlant')),
                    },
                    'responses': _responses(
                        'The plant without its `id`',
                        _json(_component('Plant')),
                        *responses,
                    ),
                }
            },
            '/livez': _public('live', 'The process answers', _status('live')),
            '/readyz': _public(
                'ready', 'An add would work now', _status('ready'), '503'
            ),
            '/openapi.json': _public(
                'describe', 'This description', _json({'type': 'object'})
            ),
            '/docs': _public(
                'page', 'A page to try it on', {'text/html': {'schema': {}}}
            ),
        },
        'components': {
            'schemas': _schemas(),
            'responses': responses
            | {
                'default': {
                    'description': 'Any other answer. HTTP may demand one of the '
                    'server itself (414, 417, 431, 501).',
                    'headers': _headers('Allow'),
                    'content': _errors(others),
                }
            },
            'headers': _HEADERS,
            'securitySchemes': {'token': {'type': 'http', 'scheme': 'bearer'}},
        },
    }


def _public(id: str, summary: str, content: Any, *responses: str) -> dict[str, Any]:
    """Return a path with a GET that needs no token."""
    operation = {
        'operationId': id,
        'tags': ['Without a token'],
        'summary': summary,
        'security': [],
        'responses': _responses(summary, content, *responses),
    }
    return {'get': operation}


def _responses(description: str, content: Any, *others: str) -> dict[str, Any]:
    ok = {'description': description, 'headers': _headers(), 'content': content}
    return {'200': ok} | {
        name: {'$ref': f'#/components/responses/{name}'}
        for name in [*others, 'default']
    }


def _error(errors: Mapping[int, str], status: int, *headers: str) -> dict[str, Any]:
    of_status = {
        value: meaning for value, meaning in errors.items() if value // 100 == status
    }
    return {
        'description': HTTPStatus(status).phrase,
        'headers': _headers(*headers),
        'content': _errors(of_status),
    }


def _errors(errors: Mapping[int, str]) -> dict[str, Any]:
    content = _json(_component('Error'))
    content['application/json']['examples'] = {
        str(value): {'summary': meaning, 'value': {'error': value, 'message': meaning}}
        for value, meaning in errors.items()
    }
    return content


def _status(status: str) -> dict[str, Any]:
    properties = {'status': {'const': status}}
    return _json({'type': 'object', 'required': ['status'], 'properties': properties})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {'application/json': {'schema': schema}}


def _component(name: str) -> dict[str, Any]:
    return {'$ref': f'#/components/schemas/{name}'}


def _headers(*names: str) -> dict[str, Any]:
    return {
        name: {'$ref': f'#/components/headers/{name}'}
        for name in ['X-Request-Id', *names]
    }


def _schemas() -> dict[str, Any]:
    """Return the files as components: as they are, but for where they are.

    Without ``$id``, a base of its own, a schema's references mean the same to tools
    that know JSON Schema and to those that only know OpenAPI.
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
        schema: In the file of that name, at any depth.
        name: Of its file, without ``.json``.
    """
    if isinstance(schema, dict):
        match = _REFERENCE.fullmatch(schema.get('$ref', '#none'))
        if match:
            file, pointer = match.groups(default='')
            schema['$ref'] = _component(file or name)['$ref'] + pointer
        for part in DRAFT202012.subresources_of(schema):
            _move_references(part, name)
