"""A client's connection: its greenlet reads requests and has them answered.

Sockets are gevent's, and nothing is gunicorn's. ``Server.end_waits`` ends late waits.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http import HTTPStatus
from io import BytesIO
from ssl import SSLContext
from typing import Any
from wsgiref.types import WSGIApplication, WSGIEnvironment

import gevent
from gevent.lock import Semaphore
from gevent.ssl import SSLSocket

from serving.request import Request, read_head
from serving.scheduler import poll
from web.errors import FAULT, Fault

FIRST_REQUEST = 15  # seconds for a new connection to begin its first request
REQUEST_TIMEOUT = 30  # seconds for a request, and for an answer without progress
LINGER = 2  # seconds for a last answer; a client that is silent for longer makes room
RECEIVE = 16 * 1024  # bytes that are received at once
SEND = 64 * 1024  # bytes that are sent at once; a shorter answer is one piece
NEVER = float('inf')


class Answer:
    """What an application answers; ``status``, ``headers``, ``sent`` are for a log."""

    def __init__(self, call: WSGIApplication, environ: WSGIEnvironment) -> None:
        result = call(environ, self._start)
        try:
            self.body = b''.join(result)
        finally:
            if hasattr(result, 'close'):
                result.close()
        self.sent = len(self.body)
        self.fields = ''.join([f'\r\n{name}: {text}' for name, text in self.headers])
        for end in '\r\n':
            if self.fields.count(end) != len(self.headers):
                raise ValueError('a field of the answer has a line end in it')

    def _start(self, status: str, headers: list[tuple[str, str]], _: Any = None) -> Any:
        self.status, self.headers = status, headers


@dataclass(eq=False)
class Server:
    """What the connections of a process share."""

    application: WSGIApplication
    plants: WSGIApplication  # answers what is refused, and what the other one failed to
    max_body_bytes: int  # a longer body is not read
    tls: SSLContext | None
    log_error: Callable[..., None]  # as ``logging.Logger.error``
    log_access: Callable[..., None] | None  # of an answer, fields, environment, time
    max_connections: int
    requests_left: int  # until the worker stops
    keepalive: float  # seconds for the next request of a connection; 0: there is none
    date: str = ''  # of answers: not formatted for each
    connections: set['Connection'] = field(default_factory=set)
    pipelining: Semaphore = field(default_factory=Semaphore)

    def is_full(self) -> bool:
        return len(self.connections) >= self.max_connections

    def end_waits(self) -> None:
        """End the waits whose time has passed; a callback of the event loop."""
        now = time.monotonic()
        late = {each for each in self.connections if each.deadline < now}
        if self.is_full():
            silent = [each for each in self.connections if each.heard < now - LINGER]
            silent.sort(key=lambda each: (not each.is_idle, each.heard))
            late |= {*silent[: 1 + len(silent) // 4]}
        for each in late:
            each.greenlet.throw(TimeoutError)


class Connection:
    """A connection; ``environ`` is what all its requests have in theirs."""

    def __init__(self, server: Server, sock: Any, environ: WSGIEnvironment) -> None:
        self._server, self.sock, self._environ = server, sock, environ
        self._received = bytearray()  # of the next request
        self.is_idle = True  # whether the next byte begins a request
        self.limit(FIRST_REQUEST)
        self.greenlet = gevent.spawn_raw(self._run)
        server.connections.add(self)

    def limit(self, seconds: float) -> None:
        """Wait for the client from now on; a ``TimeoutError`` will end that."""
        self.heard = time.monotonic()  # when it last sent or took something
        self.deadline = self.heard + seconds

    def _run(self) -> None:
        """Answer requests until the connection ends; the greenlet."""
        server = self._server
        try:
            if tls := server.tls:  # the first read makes the handshake
                how = {'server_side': True, 'do_handshake_on_connect': False}
                self.sock = SSLSocket(self.sock, _context=tls, **how)
            while (request := self._read()) and self._answer(request):
                del request  # an idle connection holds no request
                self.limit(server.keepalive or LINGER)
                self.is_idle = not self._received
                gevent.sleep(0)  # others go first
                if self._received:  # those who pipeline go one at a time
                    self.heard = self.deadline = NEVER
                    with server.pipelining:
                        poll()
            if request is not None:
                self._linger()
        except OSError:  # the client is gone, or late
            pass
        except Exception as ex:
            server.log_error('a connection was lost', exc_info=ex)
        finally:
            server.connections.discard(self)
            self.sock.close()

    def _send(self, data: bytes) -> None:
        """Send all; each piece that the client takes renews its time."""
        rest = memoryview(data)
        while rest:
            self.limit(REQUEST_TIMEOUT)
            rest = rest[self.sock.send(rest[:SEND]) :]

    def _linger(self) -> None:
        """Let the client take its answer, which unread bytes would reset."""
        if self._server.tls:  # RFC 9112, section 9.8: say so, and wait for no reply
            gevent.socket.wait_write(self.sock.fileno())
            with suppress(OSError), gevent.Timeout(0, False):
                self.sock.unwrap()
        self.sock.shutdown(socket.SHUT_WR)  # section 9.6; what comes is not decrypted
        last = time.monotonic() + REQUEST_TIMEOUT
        self.limit(LINGER)
        while self.sock.recv(RECEIVE) and self.heard < last:
            poll()  # others go first: it may never pause
            self.limit(LINGER)

    def _read(self) -> Request | None:
        """Read a request; return None at the end: the client sends no whole head."""
        received, request = self._received, None
        if not received:
            received += self.sock.recv(RECEIVE)
            self.is_idle = False
        self.limit(REQUEST_TIMEOUT)
        while True:
            request = request or read_head(received, self._environ)
            if request is not None:
                if whole := request.take(received, self._server.max_body_bytes):
                    return whole
                if request.expects:
                    request.expects = False
                    self.sock.sendall(b'HTTP/1.1 100 Continue\r\n\r\n')  # no more time
            data = b''
            with suppress(OSError):  # it is late
                poll()  # others go first: it may never pause
                data = self.sock.recv(RECEIVE)
            if not data:
                return request and request.end()
            self.heard = time.monotonic()
            received += data

    def _answer(self, request: Request) -> bool:
        """Have a request answered; return whether others may follow."""
        server, began, keeps = self._server, time.monotonic(), request.keeps
        self.heard = self.deadline = NEVER  # the wait is not for the client
        try:
            answer = self._call(request.environ, request.body, request.refusal)
        except Exception as ex:
            answer, keeps = self._call(request.environ, bytearray(), 500), False
            id = dict(answer.headers)['x-request-id']
            server.log_error('%s: the request failed', id, exc_info=ex)
        server.requests_left -= 1
        keeps = keeps and server.keepalive > 0
        head = (
            f'HTTP/1.1 {answer.status}\r\nServer: gunicorn\r\n'
            f'Date: {server.date}\r\n'
            f'Connection: {"keep-alive" if keeps else "close"}{answer.fields}\r\n\r\n'
        ).encode('latin-1')
        for data in [head + answer.body] if answer.sent < SEND else [head, answer.body]:
            self._send(data)
        if server.log_access is not None:
            took, all = timedelta(seconds=time.monotonic() - began), request.environ
            fields = [(x.removeprefix('HTTP_').replace('_', '-'), all[x]) for x in all]
            server.log_access(answer, fields, all, took)
        return keeps

    def _call(self, environ: WSGIEnvironment, body: bytearray, refusal: int) -> Answer:
        """Call the application; ``plants`` for what is refused with a status."""
        environ['wsgi.input'] = BytesIO(body)
        application = self._server.plants if refusal else self._server.application
        if refusal:
            text = f'{HTTPStatus(refusal).phrase}: the server cannot serve this request'
            environ[FAULT] = Fault(100 * refusal, text)
        return Answer(application, environ)
