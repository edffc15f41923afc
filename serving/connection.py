"""A client's connection: its greenlet reads requests and has them answered.

Each wait for the client has a time limit. No wait has a timer of its own: the worker
looks for late clients a few times a second, and ends their waits (``expire``).
"""

import socket
import time
from contextlib import suppress
from datetime import timedelta
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from ssl import SSLWantReadError, SSLWantWriteError
from types import SimpleNamespace
from typing import Any

import gevent

from serving.request import Request, read_head
from web.errors import FAULT, Fault

FIRST_REQUEST = 15  # seconds for a new connection to begin its first request
REQUEST_TIMEOUT = 30  # seconds for a request, and for an answer without progress
LINGER = 2  # seconds for a client to take its last answer, unless it sends more
RECEIVE = 16 * 1024  # bytes that are received before other clients are served
SEND = 64 * 1024  # bytes that are sent before that; a shorter answer is one piece

READ, WRITE = 1, 2  # events of a watcher of gevent

# RFC 9110, section 5.6.7. Called with whole seconds, so it formats once a second.
_http_date = lru_cache(maxsize=1)(lambda second: formatdate(second, usegmt=True))


class Connection:
    """A connection of a worker (``serving/worker.py``, which imports this module).

    Attributes:
        is_idle: Whether the next byte begins a request.
        since: When the wait for the client began (monotonic).
        deadline: When to end that wait; infinite while there is none.
    """

    def __init__(self, worker: Any, sock: Any, environ: dict[str, Any]) -> None:
        self._worker, self._sock, self._environ = worker, sock, environ
        self._received = bytearray()  # of the next request
        self._hub = gevent.get_hub()
        self._readable = self._hub.loop.io(sock.fileno(), READ)
        self._greenlet: Any = None  # while it waits for the client
        self._has_ended = False  # the client sends no more
        self.is_idle = True
        self.since, self.deadline = 0.0, 0.0
        self._limit(FIRST_REQUEST)

    def run(self) -> None:
        """Answer requests until the connection ends; the greenlet."""
        worker = self._worker
        try:
            while (request := self._read()) and self._answer(request):
                del request  # an idle connection holds no request
                self._limit(worker.keepalive if worker.alive else LINGER)
                if self._received:  # a client that pipelines lets others go first
                    worker.turns.wait()
            if request is not None:
                self._linger()
        except OSError as ex:  # the client is gone, or late
            if getattr(ex, 'reason', '') == 'HTTP_REQUEST':
                worker.log.warning(
                    'a connection was refused (HTTP to a port for HTTPS?)'
                )
        except Exception:
            worker.log.exception('a connection was lost')
        finally:
            worker.connections.discard(self)
            self._readable.close()  # before the socket, or libev ends the process
            self._sock.close()

    # Called by the worker.

    def expire(self) -> None:
        """End a wait whose deadline has passed; a callback of the event loop."""
        greenlet = self._greenlet
        if greenlet is not None and self.deadline < time.monotonic():
            self._greenlet = None
            greenlet.throw(TimeoutError)

    def hurry(self) -> None:
        """Let a client that is idle send one more request, but soon."""
        if self.is_idle:
            self.deadline = min(self.deadline, time.monotonic() + LINGER)

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the connection down, without a word of TLS."""
        with suppress(OSError):  # the client is gone
            socket.socket.shutdown(self._sock, how)

    # Waits of the greenlet; each may raise TimeoutError.

    def _limit(self, seconds: float) -> None:
        self.since = time.monotonic()
        self.deadline = self.since + seconds

    def _wait_readable(self) -> None:
        # The watcher is left on: to start it again would take a system call.
        if not self._readable.active:
            self._readable.start(self._go_on, self._readable)
        self._greenlet = gevent.getcurrent()
        self._hub.switch()

    def _wait_writable(self) -> None:
        watcher = self._hub.loop.io(self._sock.fileno(), WRITE)
        watcher.start(self._go_on, watcher)
        self._readable.stop()
        self._greenlet = gevent.getcurrent()
        try:
            self._hub.switch()
        finally:
            watcher.close()

    def _go_on(self, watcher: Any) -> None:
        greenlet, self._greenlet = self._greenlet, None
        if greenlet is None:
            watcher.stop()  # until the greenlet waits again
        else:
            greenlet.switch()

    def _receive(self) -> bytes:
        """Receive bytes; none at the end of the stream, or of the client's time."""
        sock = self._sock
        if self._worker.tls is None or not sock.pending():
            self._wait_readable()
        else:
            self._worker.turns.wait()
        while True:
            try:
                data: bytes = sock.recv(RECEIVE)
                break
            except (BlockingIOError, SSLWantReadError):
                self._wait_readable()
            except SSLWantWriteError:
                self._wait_writable()
        self._has_ended = not data
        return data

    def _send(self, data: bytes) -> None:
        """Send all; each piece that the client takes renews its time."""
        rest = data if len(data) <= SEND else memoryview(data)
        while True:
            self._limit(REQUEST_TIMEOUT)
            try:
                sent = self._sock.send(rest[:SEND])
                if sent == len(rest):
                    break
                rest = memoryview(rest)[sent:]
                self._wait_writable()
            except (BlockingIOError, SSLWantWriteError):
                self._wait_writable()
            except SSLWantReadError:
                self._wait_readable()

    def _linger(self) -> None:
        """Let the client take its last answer: unread bytes would reset it.

        RFC 9112, section 9.6. A client may send a long body before it reads.
        """
        self.shut(socket.SHUT_WR)
        self._received.clear()
        last = time.monotonic() + REQUEST_TIMEOUT
        while not self._has_ended:
            self._limit(LINGER)
            self.deadline = min(self.deadline, last)
            self._wait_readable()
            # What TLS has encrypted need not be decrypted.
            self._has_ended = not socket.socket.recv(self._sock, SEND)

    # A request and its answer.

    def _read(self) -> Request | None:
        """Read a request; return None if the client does not send a whole head."""
        received, request, seen = self._received, None, 0
        limit = self._worker.max_body
        if not received:
            self.is_idle = True
            received += self._receive()
            self.is_idle = False
        self._limit(REQUEST_TIMEOUT)
        while True:
            if request is None:
                request = read_head(received, seen, self._environ, limit)
                seen = len(received)
            if request is not None:
                if request.take(received):
                    return request
                if request.expects:
                    request.expects = False
                    self._send(b'HTTP/1.1 100 Continue\r\n\r\n')
            try:
                data = self._receive()
            except TimeoutError:
                data = b''
            if not data:
                if request is not None:
                    request.end(received)
                return request
            received += data

    def _answer(self, request: Request) -> bool:
        """Have the application answer a request; return whether others may follow."""
        worker, began = self._worker, time.monotonic()
        self.deadline = float('inf')  # the wait is not for the client
        worker.count()
        try:
            if request.fault:
                fields, body = self._refuse(request, request.fault)
            else:
                request.environ['wsgi.input'] = BytesIO(request.body)
                fields, body = self._run(worker.wsgi, request)
        except Exception as ex:
            fields, body = self._refuse(request, 500, ex)
        keeps = request.keeps and worker.alive and worker.keepalive > 0
        head = (
            f'HTTP/1.1 {self._status}\r\nServer: gunicorn\r\n'
            f'Date: {_http_date(int(time.time()))}\r\n'
            f'Connection: {"keep-alive" if keeps else "close"}{fields}\r\n\r\n'
        ).encode('latin-1')
        if len(body) < SEND:
            self._send(head + body)
        else:
            self._send(head)
            self._send(body)
        if worker.logs_access:
            self._log_access(request, len(body), time.monotonic() - began)
        return keeps

    def _run(self, application: Any, request: Request) -> tuple[str, bytes]:
        """Call an application; return the fields and the body of its answer."""
        self._written: list[bytes] = []
        result = application(request.environ, self._start_response)
        try:
            parts = [*self._written, *result]
        finally:
            if hasattr(result, 'close'):
                result.close()
        body = parts[0] if len(parts) == 1 else b''.join(parts)
        fields = ''.join([f'\r\n{name}: {value}' for name, value in self._headers])
        if not fields.count('\r') == fields.count('\n') == len(self._headers):
            raise ValueError('a field of the answer has a line end in it')
        has_body = self._status[:3] not in ('204', '304')
        if has_body and '\r\ncontent-length: ' not in fields.lower():
            fields += f'\r\nContent-Length: {len(body)}'
        is_head = request.environ['REQUEST_METHOD'] == 'HEAD'
        return fields, b'' if is_head or not has_body else body

    def _start_response(self, status: str, headers: Any, exc_info: Any = None) -> Any:
        self._status, self._headers = status, headers
        return self._written.append

    def _refuse(
        self, request: Request, status: int, error: Exception | None = None
    ) -> tuple[str, bytes]:
        """Have the application answer what the server refuses, or failed to serve."""
        request.keeps = False
        phrase = HTTPStatus(status).phrase
        fault = Fault(
            100 * status, f'{phrase}: the HTTP server cannot serve this request'
        )
        environ = {'REQUEST_METHOD': '-', 'PATH_INFO': '-', **request.environ}
        request.environ = environ | {FAULT: fault, 'wsgi.input': BytesIO(request.body)}
        answer = self._run(self._worker.refusals, request)
        id = dict(self._headers)['x-request-id']
        if error is None:
            self._worker.log.warning('%s: request refused: %s', id, phrase)
        else:
            self._worker.log.error('%s: request failed', id, exc_info=error)
        return answer

    def _log_access(self, request: Request, sent: int, seconds: float) -> None:
        environ = request.environ
        fields = [
            (key[5:].replace('_', '-'), text)
            for key, text in environ.items()
            if key[:5] == 'HTTP_'
        ]
        answer = SimpleNamespace(status=self._status, headers=self._headers, sent=sent)
        took = timedelta(seconds=seconds)
        self._worker.log.access(answer, fields, environ, took)
