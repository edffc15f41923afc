"""Public documents: the OpenAPI description, and the page to try the service."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import falcon

from store import __version__
from store.base import to_json
from web.errors import ErrorValue, Fault

_HEADERS = {
    # The page loads its own files and talks to this service; its style has its images.
    'Content-Security-Policy': "default-src 'self'; img-src data:; base-uri 'none'"
    "; form-action 'none'; frame-ancestors 'none'",
    'X-Content-Type-Options': 'nosniff',
}

# The files of the page, ours and those of Swagger UI. No other file is served.
_PAGE = 'docs.html', 'docs.css', 'docs.js', 'swagger-ui.css', 'swagger-ui-bundle.js'


@dataclass(eq=False)
class ReadOnlyResource:
    """Answers with what ``read`` returns."""

    read: Callable[[], bytes]
    media_type: str = falcon.MEDIA_JSON
    max_age: int | None = None  # of a document, in seconds; nothing else is cached

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = self.read()  # NOTE: first, since it may raise
        resp.content_type = self.media_type
        if self.max_age is not None:
            resp.set_headers({**_HEADERS, 'Cache-Control': f'max-age={self.max_age}'})

    on_head = on_get


def documents(files: dict[str, Any], metrics: bool) -> dict[str, ReadOnlyResource]:
    """Return the resources for the description and the files of the page, by path."""
    description = json.loads(Path(__file__).with_name('openapi.json').read_bytes())
    description['info']['version'] = __version__
    schemas = {Path(file).stem: _merged(files[file], files) for file in files}
    description['components']['schemas'] = schemas
    if not metrics:
        del description['paths']['/metrics']
    encoded = to_json(description).encode()
    resources = {'/openapi.json': ReadOnlyResource(lambda: encoded, max_age=0)}
    for name in _PAGE:
        read = cache(partial(_read_page, name))  # all clients share the bytes
        kind = name.split('.')[-1].replace('js', 'javascript')
        path = '/docs' if name == 'docs.html' else f'/docs/{name}'
        max_age = 86_400 * name.startswith('swagger')  # changes with its package only
        resources[path] = ReadOnlyResource(read, f'text/{kind}; charset=utf-8', max_age)
    return resources


def _read_page(name: str) -> bytes:
    """Return a file of the page, ours or Swagger UI's."""
    try:
        from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]
    except ImportError as ex:
        raise Fault(ErrorValue.NO_SUCH_PATH, 'it needs swagger-ui-bundle-v2') from ex
    ours = Path(__file__).parent / 'page' / name
    return (ours if ours.exists() else Path(swagger_ui_path, name)).read_bytes()


def _merged(schema: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the members of its ``allOf``, which generators misread."""
    merged = {k: schema[k] for k in schema if k not in ('$id', 'allOf')}
    for part in [each for each in schema.get('allOf', []) if isinstance(each, dict)]:
        part = files.get(part.get('$ref', ''), part)
        merged['properties'] = merged.get('properties', {}) | part.get('properties', {})
        merged['required'] = merged.get('required', []) + part.get('required', [])
    return merged
