"""A client's connection: its greenlet reads requests and has them answered.

The socket is gevent's. No wait has a timer of its own: the worker looks for late
clients a few times a second, and ends their waits.
"""

import socket
import time
from contextlib import suppress
from datetime import timedelta
from http import HTTPStatus
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import gevent
from gevent.ssl import SSLSocket

from serving.request import Request, read_head
from serving.scheduler import poll
from web.errors import FAULT, Fault

FIRST_REQUEST = 15  # seconds for a new connection to begin its first request
REQUEST_TIMEOUT = 30  # seconds for a request, and for an answer without progress
LINGER = 2  # seconds for a client to take its last answer, unless it sends more
RECEIVE = 16 * 1024  # bytes that are received at once
SEND = 64 * 1024  # bytes that are sent at once; a shorter answer is one piece


class Connection:
    """A connection of a worker (``serving/worker.py``, which imports this module).

    Attributes:
        is_idle: Whether the next byte begins a request.
        since: When the wait for the client began (monotonic); infinite without one.
        limit: How long that wait may take, in seconds.
        greenlet: Where the worker ends that wait, with a ``TimeoutError``.
    """

    def __init__(self, worker: Any, sock: Any, environ: dict[str, Any]) -> None:
        self._worker, self.sock, self._environ = worker, sock, environ
        self._received = bytearray()  # of the next request
        self.is_idle = True
        self._limit(FIRST_REQUEST)
        self.greenlet = gevent.spawn_raw(self._run)

    def _run(self) -> None:
        """Answer requests until the connection ends; the greenlet."""
        worker = self._worker
        try:
            if worker.plants.tls is not None:  # the first read makes the handshake
                how = {'server_side': True, 'do_handshake_on_connect': False}
                self.sock = SSLSocket(self.sock, _context=worker.plants.tls, **how)
            while (request := self._read()) and self._answer(request):
                del request  # an idle connection holds no request
                self._limit(worker.keepalive if worker.alive else LINGER)
                self.is_idle = not self._received
                gevent.sleep(0)  # others go first
                if self._received:  # until their requests are read
                    self.since = float('inf')  # the wait is not for the client
                    with worker.pipelining:
                        poll()
            if request is not None:
                self._linger()
        except OSError:  # the client is gone, or late
            pass
        except Exception:
            worker.log.exception('a connection was lost')
        finally:
            worker.connections.discard(self)
            self.sock.close()

    def _limit(self, seconds: float) -> None:
        self.since, self.limit = time.monotonic(), seconds

    def _send(self, data: bytes) -> None:
        """Send all; each piece that the client takes renews its time."""
        rest = memoryview(data)
        while rest:
            self._limit(REQUEST_TIMEOUT)
            rest = rest[self.sock.send(rest[:SEND]) :]

    def _linger(self) -> None:
        """Let the client take its last answer, which unread bytes would reset.

        RFC 9112, section 9.6: it may send a long body before it reads.
        """
        self.sock.shutdown(socket.SHUT_WR)  # with TLS, what follows is not decrypted
        last = time.monotonic() + REQUEST_TIMEOUT
        self._limit(LINGER)
        while self.sock.recv(RECEIVE) and self.since < last:
            poll()  # others go first: it may never pause
            self._limit(LINGER)

    def _read(self) -> Request | None:
        """Read a request; return None if the client does not send a whole head."""
        received, request = self._received, None
        if not received:
            received += self.sock.recv(RECEIVE)
            self.is_idle = False
        self._limit(REQUEST_TIMEOUT)
        while True:
            request = request or read_head(received, self._environ)
            if request is not None:
                if request.take(received, self._worker.plants.max_body_bytes):
                    break
                if request.expects:
                    request.expects = False
                    self._send(b'HTTP/1.1 100 Continue\r\n\r\n')
            data = b''
            with suppress(OSError):  # it is late
                poll()  # others go first: it may never pause
                data = self.sock.recv(RECEIVE)
            if not data:
                if request is not None:
                    request.end()
                break
            received += data
        return request

    def _answer(self, request: Request) -> bool:
        """Have the application answer a request; return whether others may follow."""
        worker, began = self._worker, time.monotonic()
        self.since = float('inf')  # the wait is not for the client
        worker.nr += 1
        if worker.nr >= worker.max_requests:
            worker.alive = False
        try:
            fields, body = self._call(request)
        except Exception as ex:
            request.fault, request.keeps = 500, False
            fields, body = self._call(request)
            id = dict(self._headers)['x-request-id']
            worker.log.error('%s: request failed', id, exc_info=ex)
        keeps = request.keeps and worker.alive and worker.keepalive > 0
        head = (
            f'HTTP/1.1 {self._status}\r\nServer: gunicorn\r\n'
            f'Date: {worker.date}\r\n'
            f'Connection: {"keep-alive" if keeps else "close"}{fields}\r\n\r\n'
        ).encode('latin-1')
        for data in [head + body] if len(body) < SEND else [head, body]:
            self._send(data)
        if worker.log.access_log_enabled:
            self._log_access(request, len(body), time.monotonic() - began)
        return keeps

    def _call(self, request: Request) -> tuple[str, bytes]:
        """Call the application; return the fields and the body of its answer.

        It also answers what the server refuses, or failed to serve.
        """
        environ, application = request.environ, self._worker.wsgi
        if request.fault:
            application = self._worker.plants
            phrase = HTTPStatus(request.fault).phrase
            message = f'{phrase}: the HTTP server cannot serve this request'
            environ[FAULT] = Fault(100 * request.fault, message)
        environ['wsgi.input'] = BytesIO(request.body)
        result = application(environ, self._start_response)
        try:
            body = b''.join(result)
        finally:
            if hasattr(result, 'close'):
                result.close()
        fields = ''.join([f'\r\n{name}: {value}' for name, value in self._headers])
        if not fields.count('\r') == fields.count('\n') == len(self._headers):
            raise ValueError('a field of the answer has a line end in it')
        return fields, body

    def _start_response(self, status: str, headers: Any, exc_info: Any = None) -> None:
        self._status, self._headers = status, headers

    def _log_access(self, request: Request, sent: int, seconds: float) -> None:
        names = (name for name in request.environ if name[:5] == 'HTTP_')
        fields = [(name[5:].replace('_', '-'), request.environ[name]) for name in names]
        answer = SimpleNamespace(status=self._status, headers=self._headers, sent=sent)
        took = timedelta(seconds=seconds)
        self._worker.log.access(answer, fields, request.environ, took)
