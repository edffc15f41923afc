"""The description of the interface (OpenAPI 3.1)."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from referencing.jsonschema import DRAFT202012

import schemas
from store import __version__
from web.errors import ErrorValue

# A reference to another file, to a place in it, or to a place in the same file. An
# anchor (#name) does not match: it is found anywhere in a document.
_REFERENCE = re.compile(r'(?:([A-Za-z0-9._-]+)\.json)?(?:#(/.*)?)?')

# What the specification calls every response but 200.
_UNEXPECTED = 'unexpected error'

_HEADERS: dict[str, Any] = {
    'X-Request-Id': {
        'description': 'The id of the request in the log: what the request had in '
        'this header, or a new id.',
        'required': True,
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


def describe(max_body_bytes: int, *, metrics: bool = False) -> dict[str, Any]:
    """Return the description of a service.

    Args:
        max_body_bytes: The longest body that the service reads.
        metrics: Whether ``/metrics`` is served.

    Raises:
        ValueError: A file is not a JSON Schema; the message is a sentence.
    """
    responses = {
        '400': _error(400),
        '401': _error(401, 'WWW-Authenticate'),
        '500': _error(500),
        '503': _error(503, 'Retry-After'),
    }
    others = [value for value in ErrorValue if str(value.status) not in responses]
    text = {'text/plain': {'schema': {'type': 'string'}}}
    metrics_item = _get(
        'metrics', 'Metrics in the text format of Prometheus', text, '401', public=False
    )
    return {
        'openapi': '3.1.0',
        'info': {
            'title': 'Plant store',
            'description': 'A sample interface for a plant store. A plant that was '
            'answered with 200 is never lost.',
            'version': __version__,
            'license': {'name': 'MIT', 'identifier': 'MIT'},
        },
        # Relative to the address of the description (OpenAPI 3.1.0, section 4.8.5). So
        # it is right under any prefix, also under one that a proxy removes without a
        # header, and it trusts no host and no scheme that a request claims.
        'servers': [{'url': '.', 'description': 'this service'}],
        'security': [{'bearerAuth': []}],
        'paths': {
            '/plants': {
                'post': {
                    'operationId': 'addPlant',
                    'tags': ['Plants'],
                    'summary': 'Create plant',
                    'description': 'Adds a plant to the store. The same plant again '
                    'is answered in the same way and stored once, so a request whose '
                    'answer was lost may be sent again. A different plant with a taken '
                    '`id` is refused.',
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
            '/livez': _get('live', 'The process answers', _status('live')),
            '/readyz': _get('ready', 'An add would work now', _status('ready'), '503'),
            **({'/metrics': metrics_item} if metrics else {}),
            '/openapi.json': _get(
                'describe', 'This description', _json({'type': 'object'})
            ),
            '/docs': _get(
                'page', 'A page to try the service', {'text/html': {'schema': {}}}
            ),
        },
        'components': {
            'schemas': _schemas(),
            'responses': responses
            | {
                'default': {
                    'description': f'{_UNEXPECTED}: any other status. The HTTP server '
                    'itself may answer 414, 417 or 431.',
                    'headers': _headers('Allow'),
                    'content': _errors(others),
                }
            },
            'headers': _HEADERS,
            'securitySchemes': {
                'bearerAuth': {
                    'type': 'http',
                    'scheme': 'bearer',
                    'description': 'A token from the operator of the service, who '
                    'configures which are accepted (`PLANTS_TOKENS` or '
                    '`PLANTS_TOKENS_FILE`). With none configured the server makes one '
                    'and prints it when it starts.',
                }
            },
        },
    }


def _get(
    id: str, summary: str, content: Any, *responses: str, public: bool = True
) -> dict[str, Any]:
    """Return the item of a path with a GET, which needs no token if it is public."""
    open_to_all = {'tags': ['Without a token'], 'security': []}
    operation = {
        'operationId': id,
        'summary': summary,
        'responses': _responses(summary, content, *responses),
        **(open_to_all if public else {'tags': ['Operation']}),
    }
    return {'get': operation}


def _responses(description: str, content: Any, *others: str) -> dict[str, Any]:
    ok = {'description': description, 'headers': _headers(), 'content': content}
    return {'200': ok} | {
        name: {'$ref': f'#/components/responses/{name}'}
        for name in [*others, 'default']
    }


def _error(status: int, *headers: str) -> dict[str, Any]:
    return {
        'description': f'{_UNEXPECTED}: {HTTPStatus(status).phrase}',
        'headers': _headers(*headers),
        'content': _errors([value for value in ErrorValue if value.status == status]),
    }


def _errors(values: list[ErrorValue]) -> dict[str, Any]:
    content = _json(_component('Error'))
    content['application/json']['examples'] = {
        str(int(value)): {
            'summary': value.meaning,
            'value': {'error': int(value), 'message': value.meaning},
        }
        for value in values
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
            schema['$ref'] = _component(file or name)['$ref'] + pointer
        for part in DRAFT202012.subresources_of(schema):
            _move_references(part, name)
