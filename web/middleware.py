"""Middleware for every request: id and log line, CORS, token, path and method."""

import logging
import random
import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import falcon
from falcon import Response

from web.errors import FAULT, ErrorValue, Fault
from web.request import PlantsRequest
from web.tokens import Tokens

log = logging.getLogger('plants')

# A request id that a client may choose: nothing that could break a line or a header.
_SANE_ID = re.compile(r'[A-Za-z0-9._~+/=:@-]{1,128}')

# Percent-encoded text cannot break a line of the log.
_quote = lru_cache(maxsize=32)(quote)  # small: a stranger may fill it


class RequestLog:
    """Middleware: give each request an id, and the log a line about it.

    The ``args`` of the log record are a mapping, for formatters that write members.
    """

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        id = req.env.get('HTTP_X_REQUEST_ID', '')
        is_sane = _SANE_ID.fullmatch(id)
        req.id = id if is_sane else f'{random.getrandbits(64):016x}'
        resp.set_header('X-Request-Id', req.id)
        resp.set_header('Cache-Control', 'no-store')  # documents have their own
        if FAULT in req.env:
            raise req.env[FAULT]

    def process_response(self, req: PlantsRequest, resp: Response, *_: object) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        members = {
            'message': 'request',
            'request_id': req.id,
            'token': req.token_name,
            'method': _quote(req.method),
            # NOTE: without the query string: a token may be in it.
            'path': _quote(req.path),
            'status': resp.status_code,
            'error': req.error,
            'duration_ms': round(1000 * (time.perf_counter() - req.began), 3),
            'bytes': 0 if req.method == 'HEAD' else len(resp.data or b''),
        }
        log.info(
            '%(request_id)s %(token)s %(method)s %(path)s %(status)d %(error)d '
            '%(duration_ms).1f ms %(bytes)d bytes',
            members,
        )


# An origin as browsers write it: in lower case, without a path or a default port (RFC
# 6454, section 6.2).
_ORIGIN = re.compile(
    r'(?!http:.*:80$|https:.*:443$)'
    r'[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]+)?'
)


class CrossOrigin(falcon.CORSMiddleware):  # type: ignore[type-arg]
    """Middleware: let pages of other origins send requests and read the answers.

    A preflight request (Fetch standard, section 3.3.2) has no token, so the answer is
    the same for every path. A ``ValueError`` names an origin that no browser sends.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        origins = [origins] if isinstance(origins, str) else list(origins)
        for origin in origins:
            if origins != ['*'] and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f'{origin!r} is not an origin as browsers send it, like '
                    f'https://example.org, and not * alone'
                )
        exposed = ['X-Request-Id', 'Retry-After']
        super().__init__('*' if origins == ['*'] else origins, exposed)

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        if req.method == 'OPTIONS' and req.get_header('Access-Control-Request-Method'):
            resp.status = falcon.HTTP_204
            # Falcon turns this into Access-Control-Allow-Methods.
            resp.set_header('Allow', 'GET, HEAD, POST')
            resp.complete = True

    def process_response(self, req: Any, resp: Any, *rest: Any) -> None:
        super().process_response(req, resp, *rest)
        resp.append_header('Vary', 'Origin')


class BearerAuth:
    """Middleware: only ``public`` paths are open without a bearer token (RFC 6750).

    It runs before the router: without a token a path that does not exist is 401.

    ``tokens`` has the accepted ones by path; those of '' are for all other paths.
    """

    def __init__(self, tokens: Mapping[str, Tokens], public: Iterable[str]) -> None:
        self._tokens = tokens
        self._public = frozenset(public)

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        if req.path in self._public:
            return
        scheme, _, text = (req.auth or '').partition(' ')
        text = text.strip(' \t')
        if scheme.lower() != 'bearer' or not text:
            is_start = req.path == '/' and req.method in ('GET', 'HEAD')
            if is_start and 'text/html' in req.accept:
                # Relative (./docs or garden/docs): right under any prefix.
                mount = '.' if req.env['PATH_INFO'] else req.root_path.split('/')[-1]
                raise falcon.HTTPSeeOther(f'{mount}/docs')
            message = "send the header 'Authorization: Bearer TOKEN'; see /docs"
            raise Fault(ErrorValue.NO_TOKEN, message, www_authenticate='Bearer')
        tokens = self._tokens.get(req.path, self._tokens[''])
        if (name := tokens.find(text)) is None:
            challenge = 'Bearer error="invalid_token"'
            raise Fault(ErrorValue.INVALID_TOKEN, www_authenticate=challenge)
        req.token_name = name


class StrictRouting:
    """Middleware: another spelling of a path is 404, a method without responder 405.

    Falcon takes ``//plants`` for ``/plants``, answers OPTIONS by itself, and refuses a
    method that it does not know with 400.
    """

    def process_resource(
        self, req: PlantsRequest, resp: Response, resource: object, params: object
    ) -> None:
        if req.path != req.uri_template:
            raise falcon.HTTPNotFound()
        responder = f'on_{req.method.lower()}'
        if not req.method.isupper() or not hasattr(resource, responder):
            allowed = ', '.join(
                name[3:].upper() for name in dir(resource) if name.startswith('on_')
            )
            value = ErrorValue.METHOD_NOT_ALLOWED
            raise Fault(value, f'{value.meaning}; allowed: {allowed}', allow=allowed)
