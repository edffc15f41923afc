"""What every request meets: its id and log line, CORS, the token, path and method."""

import logging
import random
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import falcon
from falcon import Response

from web.errors import FAULT, ErrorValue, Fault
from web.tokens import Tokens

log = logging.getLogger('plants')

# What a client may choose: nothing that could break a line or a header.
_SANE_ID = re.compile(r'[A-Za-z0-9._~+/=:@-]{1,128}')


class PlantsRequest(falcon.Request):
    """A request, with what the log says about it."""

    token_name = '-'  # of the accepted token
    error = 0  # the ErrorValue of the answer, or 0

    def __init__(self, env: dict[str, Any], options: Any = None) -> None:
        self.began = time.perf_counter()
        id = env.get('HTTP_X_REQUEST_ID', '')
        self.id = id if _SANE_ID.fullmatch(id) else f'{random.getrandbits(64):016x}'
        env.setdefault('PATH_INFO', '')  # PEP 3333: it may be absent when it is empty
        super().__init__(env, options)
        # To this method Falcon would answer 400 before any middleware asks for a token.
        self.method = self.method.replace('WEBSOCKET', 'websocket')


class RequestLog:
    """Middleware: give each answer the id of its request, and the log a line."""

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        resp.set_header('X-Request-Id', req.id)
        resp.set_header('Cache-Control', 'no-store')  # documents have their own
        if FAULT in req.env:
            raise req.env[FAULT]

    def process_response(self, req: PlantsRequest, resp: Response, *_: object) -> None:
        is_probe = req.path in ('/livez', '/readyz') and not req.error
        if is_probe or not log.isEnabledFor(logging.INFO):
            return
        # Percent-encoded text of a stranger cannot break a line of the log.
        shown = quote if req.error or not req.uri_template else str
        members = {  # a mapping, for a log in JSON
            'message': 'request',
            'request_id': req.id,
            'token': req.token_name,
            'method': shown(req.method),
            # NOTE: without the query string: a token may be in it.
            'path': shown(req.path),
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


# As browsers write it: in lower case, no path, no default port (RFC 6454, section 6.2).
_ORIGIN = re.compile(
    r'(?!http:.*:80$|https:.*:443$)[a-z0-9+.-]+://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d+)?'
)


class CrossOrigin(falcon.CORSMiddleware):  # type: ignore[type-arg]
    """Middleware: let pages of other origins send requests and read the answers.

    A preflight request (Fetch standard, section 3.3.2) has no token, so the answer is
    the same for every path. An origin that no browser sends is a ``ValueError``.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        origins = [origins] if isinstance(origins, str) else list(origins)
        if origins != ['*'] and not all(map(_ORIGIN.fullmatch, origins)):
            raise ValueError('an origin is like https://example.org, or * alone')
        exposed = ['X-Request-Id', 'Retry-After']
        super().__init__('*' if origins == ['*'] else origins, exposed)

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        resp.append_header('Vary', 'Origin')
        if req.method == 'OPTIONS' and req.get_header('Access-Control-Request-Method'):
            resp.status = falcon.HTTP_204
            # Falcon turns this into Access-Control-Allow-Methods.
            resp.set_header('Allow', 'GET, HEAD, POST')
            resp.complete = True


class Gate:
    """Middleware: ask for a bearer token (RFC 6750).

    It asks before the router, so it does not tell which paths exist. Some have tokens
    of their ``own``, for which the others are not accepted, or ``None``: they are open.
    """

    def __init__(self, tokens: Tokens, own: Mapping[str, Tokens | None]) -> None:
        self._tokens, self._own = tokens, own

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        if (tokens := self._own.get(req.path, self._tokens)) is None:
            return
        scheme, _, text = req.env.get('HTTP_AUTHORIZATION', '').partition(' ')
        text = text.strip(' \t')
        if scheme.lower() != 'bearer' or not text:
            is_visit = req.path == '/' and req.method in ('GET', 'HEAD')
            if is_visit and 'text/html' in req.accept:
                # Relative (./docs or garden/docs): right under any prefix.
                mount = '.' if req.env['PATH_INFO'] else req.root_path.split('/')[-1]
                raise falcon.HTTPSeeOther(f'{quote(mount)}/docs')
            # Nothing that may be a token is shown.
            is_named = text and re.fullmatch('[A-Za-z][A-Za-z0-9-]{0,15}', scheme)
            instead = f' instead of {scheme}' if is_named else ''
            message = f"send 'Authorization: Bearer TOKEN'{instead}; see /docs"
            raise Fault(ErrorValue.NO_TOKEN, message, www_authenticate='Bearer')
        if (name := tokens.find(text)) is None:
            why = {'www_authenticate': 'Bearer error="invalid_token"'}
            raise Fault(ErrorValue.INVALID_TOKEN, 'the token is not valid', **why)
        req.token_name = name or '-'

    def process_resource(self, req: Any, resp: Any, resource: Any, *_: Any) -> None:
        """Refuse ``//plants`` with 404, OPTIONS with 405; Falcon would answer both."""
        if req.path != req.uri_template:
            raise falcon.HTTPNotFound()
        if not (req.method.isupper() and hasattr(resource, f'on_{req.method.lower()}')):
            names = [name for name in dir(resource) if name.startswith('on_')]
            allowed = ', '.join(names).replace('on_', '').upper()
            message = f'the method is not allowed here; allowed: {allowed}'
            if req.path == '/plants':
                message += '; operators read plants with: python -m store list'
            raise Fault(ErrorValue.METHOD_NOT_ALLOWED, message, allow=allowed)
