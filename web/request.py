"""The request: what the middleware finds out about it, and its body."""

import time
from typing import Any

import falcon

from web.body import show
from web.errors import ErrorValue, Fault


class PlantsRequest(falcon.Request):
    """A request, with what the middleware finds out about it."""

    id = '-'
    token_name = '-'  # of the accepted token, for the log
    error = 0  # the ErrorValue of the answer, or 0

    def __init__(
        self, env: dict[str, Any], options: falcon.RequestOptions | None = None
    ) -> None:
        self.began = time.perf_counter()
        env.setdefault('PATH_INFO', '')  # PEP 3333: it may be absent when it is empty
        super().__init__(env, options)
        if self.method == 'WEBSOCKET':
            # Falcon answers 400 to this method before any middleware runs, so without a
            # request id and a check of the token. In lower case it is just unknown.
            self.method = 'websocket'


def read_body(req: PlantsRequest, limit: int) -> bytes:
    """Return the body of a request that must have one, of at most ``limit`` bytes."""
    # RFC 9112, section 6.3: with a transfer coding, Content-Length is ignored. Then the
    # server must mark the end of the body in the input.
    chunked = 'HTTP_TRANSFER_ENCODING' in req.env
    length = 0 if chunked else req.content_length or 0
    is_there = req.env.get('wsgi.input_terminated') if chunked else length
    if not is_there:
        message = 'the body is missing; send it with a Content-Length'
        raise Fault(ErrorValue.BODY_MISSING, message)
    if fault := _media_type_fault(req):
        raise Fault(ErrorValue.WRONG_MEDIA_TYPE, fault)
    body = b'' if length > limit else _read_up_to(req, length or limit + 1)
    if max(length, len(body)) > limit:
        raise Fault(ErrorValue.BODY_TOO_LARGE, f'the body is larger than {limit} bytes')
    if len(body) < length:
        message = f'the body ended after {len(body)} of {length} bytes'
        raise Fault(ErrorValue.BAD_REQUEST, message)
    if not body:
        raise Fault(ErrorValue.BODY_MISSING, 'the body is empty')
    return body


def _read_up_to(req: PlantsRequest, size: int) -> bytes:
    pieces = []
    try:
        # NOTE: a read may return fewer bytes than it was asked for before the end.
        while size and (piece := req.stream.read(size)):
            pieces.append(piece)
            size -= len(piece)
    except Exception as ex:
        # Bad chunks, or the client is gone. Each server raises exceptions of its own.
        raise Fault(ErrorValue.BAD_REQUEST, 'the body could not be read') from ex
    return b''.join(pieces)


def _media_type_fault(req: PlantsRequest) -> str:
    """Return what is wrong with the media type, or nothing."""
    content_type, parameters = falcon.parse_header(req.content_type or '')
    if content_type.lower() != falcon.MEDIA_JSON:
        return 'the Content-Type must be application/json'
    charset = parameters.get('charset', 'utf-8')
    if charset.lower() not in ('utf-8', 'utf8'):
        return f'the charset must be utf-8, not {show(charset)}'
    if req.env.get('HTTP_CONTENT_ENCODING', 'identity').lower() != 'identity':
        return 'the body must not have a Content-Encoding'
    return ''
