"""The least that any WSGI application does: read the body, give a fixed answer.

It keeps nothing and logs nothing, so it shows what a server costs by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ANSWER = b'{"name": "Fern", "tag": "shade"}'
HEADERS = [
    ('Content-Type', 'application/json'),
    ('Content-Length', str(len(ANSWER))),
]


def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Serve any request."""
    environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0))
    start_response('200 OK', HEADERS)
    return [ANSWER]
