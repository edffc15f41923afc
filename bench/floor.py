"""The floors: what a server and a framework cost by themselves.

Both read the body, keep nothing, promise nothing, and log nothing.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import falcon
import jsonschema_rs

ANSWER = b'{"name": "Fern", "tag": "shade"}'
HEADERS = [
    ('Content-Type', 'application/json'),
    ('Content-Length', str(len(ANSWER))),
]
SCHEMA = Path(__file__).resolve().parent.parent / 'schemas' / 'Plant.json'


def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Serve any request."""
    environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0))
    start_response('200 OK', HEADERS)
    return [ANSWER]


class Bearer:
    """Middleware: the one token."""

    def __init__(self, token: str) -> None:
        self._expected = f'Bearer {token}'

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Refuse any other."""
        if not hmac.compare_digest(req.auth or '', self._expected):
            raise falcon.HTTPUnauthorized


class Plants:
    """A plant in, the same plant out."""

    def __init__(self) -> None:
        self._is_valid = jsonschema_rs.validator_for(SCHEMA.read_text()).is_valid

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Read it, check it, answer it."""
        plant = json.loads(req.stream.read(req.content_length or 0))
        if not self._is_valid(plant):
            raise falcon.HTTPBadRequest
        resp.content_type = 'application/json'
        answer = {'name': plant['name'], 'tag': plant.get('tag')}
        resp.data = json.dumps(answer).encode()


falcon_app: Any = falcon.App(middleware=[Bearer(os.environ.get('PLANTS_TOKENS', ''))])
falcon_app.add_route('/plants', Plants())
