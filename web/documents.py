"""Public documents: the OpenAPI description, and the page to try the service."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import falcon
from falcon import Response

from store import __version__
from web.body import encode
from web.errors import ErrorValue, Fault
from web.request import PlantsRequest

_HEADERS = {
    # The page may run its own scripts and talk to this service, nothing else. The style
    # sheet of Swagger UI contains its images.
    'Content-Security-Policy': (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    'X-Content-Type-Options': 'nosniff',
}

# The files of the page, by path, with their media types. No other file is served.
_PAGE = {
    '/docs': ('docs.html', 'text/html'),
    '/docs/docs.css': ('docs.css', 'text/css'),
    '/docs/docs.js': ('docs.js', 'text/javascript'),
    '/docs/swagger-ui.css': ('swagger-ui.css', 'text/css'),
    '/docs/swagger-ui-bundle.js': ('swagger-ui-bundle.js', 'text/javascript'),
}


@dataclass(eq=False)
class ReadOnlyResource:
    """Answers with what ``read`` returns."""

    read: Callable[[], bytes]
    media_type: str = falcon.MEDIA_JSON
    max_age: int | None = None  # of a document, in seconds; nothing else is cached

    def on_get(self, req: PlantsRequest, resp: Response) -> None:
        resp.data = self.read()  # NOTE: first, since it may raise
        resp.content_type = self.media_type
        if self.max_age is not None:
            resp.set_headers({**_HEADERS, 'Cache-Control': f'max-age={self.max_age}'})

    on_head = on_get


def document_resources(
    files: dict[str, Any], max_body_bytes: int, *, metrics: bool
) -> dict[str, ReadOnlyResource]:
    """Return the resources for the description and the files of the page, by path.

    ``files`` is what ``load_schemas`` has returned. The URL of the service in the
    description is relative (OpenAPI 3.1.0, section 4.8.5), so it is right under any
    prefix.
    """
    template = Path(__file__).with_name('openapi.json').read_bytes()
    description: dict[str, Any] = json.loads(template)
    description['info']['version'] = __version__
    description['components']['schemas'] = {
        file.removesuffix('.json'): _merged(schema, files)
        for file, schema in files.items()
    }
    body = description['paths']['/plants']['post']['requestBody']
    body['description'] = body['description'].format(max_body_bytes=max_body_bytes)
    if not metrics:
        del description['paths']['/metrics']
    encoded = encode(description)
    resources = {'/openapi.json': ReadOnlyResource(lambda: encoded, max_age=0)}
    for path, (name, media_type) in _PAGE.items():
        read = cache(partial(_read_page, name))  # all clients share the bytes
        max_age = 86_400 * name.startswith('swagger')  # changes with its package only
        resources[path] = ReadOnlyResource(
            read, f'{media_type}; charset=utf-8', max_age
        )
    return resources


def _read_page(name: str) -> bytes:
    """Return a file of the page, ours or Swagger UI's."""
    try:
        from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]
    except ImportError as ex:
        sentence = 'the page needs the package swagger-ui-bundle-v2'
        raise Fault(ErrorValue.NO_SUCH_PATH, sentence) from ex
    ours = Path(__file__).parent / 'page' / name
    return (ours if ours.exists() else Path(swagger_ui_path, name)).read_bytes()


def _merged(schema: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the members of its ``allOf`` parts, which may be files.

    Many client generators make no type of ``allOf``, or a type that lacks members.
    """
    merged = {
        name: rule for name, rule in schema.items() if name not in ('$id', 'allOf')
    }
    for part in schema.get('allOf', []):
        part = files.get(part.get('$ref'), part)
        for keyword, empty in ('properties', {}), ('required', []):
            of_part, own = part.get(keyword, empty), merged.get(keyword, empty)
            merged[keyword] = {**own, **of_part} if empty == {} else [*own, *of_part]
    return merged
