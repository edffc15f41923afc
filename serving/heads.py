"""Heads: gunicorn's parser, made stricter, and the heads that are known already.

A client sends the same head with each request, unless the length of the body changes.
An add takes 269 and 247 us of CPU with kept heads, and 367 and 364 without (side by
side, two workers, 16 and 64 connections).

This module and ``worker.py`` use parts of gunicorn that it does not document (methods
of a worker, a request and a response, sockets, settings). A test fails when another
version is installed than the one that they were checked against.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from typing import Any

from gunicorn.config import Config
from gunicorn.http import errors, wsgi
from gunicorn.http.body import Body, LengthReader
from gunicorn.http.message import Request
from gunicorn.http.unreader import SocketUnreader

from serving.client import Client

# The longest head of a request, in bytes. An unfinished head is held in memory.
MAX_HEAD = 32 * 1024
# What gunicorn reads away after an answer is shorter than this, in bytes.
LONG_REST = 65_536
# How many heads are kept, and the longest of them in bytes.
KNOWN_HEADS = 256
MAX_KNOWN_HEAD = 4096
# A line that gunicorn would neither refuse nor interpret.
REQUEST_ID = re.compile(rb'\r\n(?i:X-Request-Id): ?([!-~]{1,128})(?=\r\n)')

STATUSES = {
    errors.LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    errors.ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
    errors.LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    # Raised for a path outside of SCRIPT_NAME, and for nothing else.
    errors.ConfigurationProblem: HTTPStatus.NOT_FOUND,
    # Raised for errors in our own response.
    errors.InvalidResponseHeader: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.InvalidResponseHeaderName: HTTPStatus.INTERNAL_SERVER_ERROR,
}


def status_of(error: Exception) -> HTTPStatus:
    """Return the status that answers an exception raised while a request was read."""
    is_refused = isinstance(error, errors.ParseException)
    default = HTTPStatus.BAD_REQUEST if is_refused else HTTPStatus.INTERNAL_SERVER_ERROR
    return STATUSES.get(type(error), default)


class StrictRequest(Request):  # type: ignore[misc]
    """gunicorn's request, stricter where a proxy might read a head otherwise.

    gunicorn has no hook between the head and the body, and asks ``should_close`` when
    it writes the head of the response.
    """

    body: Any  # a file
    content_length: int | None = None  # in bytes; None if the body comes in chunks
    environ: dict[str, Any]  # of WSGI, once known; requests with the same head share it
    max_buffer_headers: int
    request_id = ''  # the header X-Request-Id, which they do not share

    def read_into(
        self, unreader: SocketUnreader, buf: bytearray, stop: bool = False
    ) -> None:
        if len(buf) >= MAX_HEAD:
            raise errors.LimitRequestHeaders('the head is too long')
        super().read_into(unreader, buf, stop)

    def set_body_reader(self) -> None:
        options: set[str] = set()
        for name, value in self.headers:
            if name == 'CONNECTION':
                options.update(map(str.strip, value.lower().split(',')))
            elif name == 'TRANSFER-ENCODING' and value.lower() != 'chunked':
                raise errors.InvalidHeader(name)  # RFC 9112, section 6.1
        if self.version >= (1, 1) and 'HOST' not in dict(self.headers):
            raise errors.InvalidHeader('HOST')  # RFC 9112, section 3.2
        self.environ = {}
        # The trailers of a chunked body have the limit of the head.
        self.max_buffer_headers = min(self.max_buffer_headers, MAX_HEAD)
        super().set_body_reader()
        self.must_close = 'close' in options or super().should_close()
        reader = self.body.reader
        if isinstance(reader, LengthReader):
            self.content_length = reader.length
            self.take_body(self.unreader.take_buffered())

    def take_body(self, received: bytes) -> None:
        """Take the body from the bytes received after the head, if it is complete.

        gunicorn's own reader copies it six times, which takes 26 us.
        """
        length = self.content_length or 0
        if len(received) >= length:
            self.body = BytesIO(received[:length])
            received = received[length:]
        else:
            self.body = Body(LengthReader(self.unreader, length))
        if received:
            self.unreader.unread(received)

    def finish(self) -> bool:
        """Read the rest of the body, which is short; return whether more was sent."""
        while self.body.read(LONG_REST):
            pass
        return bool(self.unreader.buf.getbuffer().nbytes)

    def should_close(self) -> bool:
        if self.must_close or self.unreader.sock.has_ended:
            return True
        if isinstance(self.body, BytesIO):
            return False
        # The client must be told in this answer if much of the body is unread, or if
        # broken chunks hide where the next request begins.
        reader = self.body.reader
        if isinstance(reader, LengthReader):
            return bool(reader.length >= LONG_REST)
        return self.body.failed or reader.parser is not None


class Response(wsgi.Response):  # type: ignore[misc]
    """gunicorn's response; the date is formatted once a second.

    Without this and the switches in ``log.py`` an add takes 200 and 125 us of CPU, with
    them 182 and 110 (side by side, two workers, 16 and 64 connections).
    """

    def default_headers(self) -> list[str]:
        major, minor = self.req.version
        connection = 'close' if self.should_close() else 'keep-alive'
        return [
            f'HTTP/{major}.{minor} {self.status}\r\n',
            f'Server: {self.version}\r\n',
            f'Date: {_http_date(int(time.time()))}\r\n',
            f'Connection: {"upgrade" if self.upgrade else connection}\r\n',
            *(['Transfer-Encoding: chunked\r\n'] if self.chunked else []),
        ]


@lru_cache(maxsize=1)
def _http_date(second: int) -> str:
    return formatdate(second, usegmt=True)  # RFC 9110, section 5.6.7


class Exchanges:
    """The requests of all connections of a worker, and their WSGI environments.

    The latest heads are kept with the result of parsing them. A request id differs each
    time, and proxies add one, so heads are known by their other lines.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._known: dict[tuple[bytes, Any, Any], dict[str, Any]] = {}

    def requests(
        self, client: Client, address: Any, listener: Any
    ) -> Iterator[StrictRequest]:
        """Yield the requests of a client, which has connected to a listener's address.

        Raises:
            OSError: The connection ended in the middle of a head.
            ParseException: The request is refused, see ``status_of``.
        """
        unreader = SocketUnreader(client)
        # gunicorn trusts the forwarding headers of some hosts only.
        host = address[0] if isinstance(address, tuple) else address
        proxied = None
        for number, received in enumerate(iter(unreader.read, b''), 1):
            end = received.find(b'\r\n\r\n') + 4
            head, request_id = received[:end], ''
            if line := REQUEST_ID.search(head):
                head = head[: line.start()] + head[line.end() :]
                request_id = line[1].decode()
            key = head, host, listener
            known = None if proxied else self._known.get(key)
            if known is None:
                unreader.unread(received)
                request = StrictRequest(self._cfg, unreader, address, number)
                request.request_id = request_id
                # What a proxy says of its client holds for the whole connection.
                proxied = request.proxy_protocol_info or proxied
                request.proxy_protocol_info = proxied
                self._keep(key, request)
            else:
                request = StrictRequest.__new__(StrictRequest)
                request.__dict__.update(known, unreader=unreader, request_id=request_id)
                request.peer_addr = request.remote_addr = address
                if request_id:
                    request.headers = [*request.headers, ('X-REQUEST-ID', request_id)]
                request.take_body(received[end:])
            yield request

    def _keep(self, key: tuple[bytes, Any, Any], request: StrictRequest) -> None:
        cfg = self._cfg
        names = [name.replace('_', '-') for name, _ in request.headers]
        if (
            not 4 <= len(key[0]) <= MAX_KNOWN_HEAD
            # The head alone does not determine the request.
            or request.content_length is None
            or request.proxy_protocol_info
            or request._expected_100_continue
            # An operator's hook may change each request.
            or cfg.pre_request is not cfg.settings['pre_request'].default
            # The line with a request id may go on, or another one might be refused.
            or cfg.permit_obsolete_folding
            or request.limit_request_field_size < 256
            or len(names) >= request.limit_request_fields
            # There are two.
            or names.count('X-REQUEST-ID') != bool(request.request_id)
            # The line that was cut out may have been the first one.
            or key[0].startswith(b'\r')
        ):
            return
        if len(self._known) == KNOWN_HEADS:
            self._known.clear()
        headers = [pair for pair in request.headers if pair[0] != 'X-REQUEST-ID']
        known = vars(request) | {'headers': headers, 'body': None, 'unreader': None}
        self._known[key] = known

    def respond(
        self, request: StrictRequest, listener: Any
    ) -> tuple[Response, dict[str, Any]]:
        """Return the response to a request, empty yet, and the WSGI environment.

        Raises:
            ConfigurationProblem: The path is outside of SCRIPT_NAME.
        """
        client, address = request.unreader.sock, request.peer_addr
        if request.environ:
            response = Response(request, client, self._cfg)
            environ = request.environ.copy()
            environ['wsgi.input'] = request.body
            environ['gunicorn.socket'] = client
            if request.request_id:
                environ['HTTP_X_REQUEST_ID'] = request.request_id
            if isinstance(address, tuple):
                environ['REMOTE_PORT'] = str(address[1])
            return response, environ
        response, environ = wsgi.create(
            request, client, address, listener, self._cfg, Response
        )
        # gunicorn finds /plants2 in the SCRIPT_NAME /plants.
        if environ['SCRIPT_NAME'] and environ['PATH_INFO'][:1] not in ('', '/'):
            raise errors.ConfigurationProblem('the path is outside of SCRIPT_NAME')
        del environ['wsgi.early_hints']  # they would wait in the response buffer
        environ['wsgi.multithread'] = True
        request.environ.update(environ)
        request.environ['wsgi.input'] = request.environ['gunicorn.socket'] = None
        request.environ.pop('HTTP_X_REQUEST_ID', None)
        return response, environ
