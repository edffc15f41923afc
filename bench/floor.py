"""The minimal WSGI application: read the body, send a fixed response.

It stores nothing and logs nothing, so it shows the cost of the server alone.
"""

from collections.abc import Iterable
from typing import Any

ANSWER = b'{"name": "Fern", "tag": "shade"}'
HEADERS = [
    ('Content-Type', 'application/json'),
    ('Content-Length', str(len(ANSWER))),
]


def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Answer every request with 200."""
    environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0))
    start_response('200 OK', HEADERS)
    return [ANSWER]
