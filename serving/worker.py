"""The worker: gunicorn's gevent worker, with additions.

One thread serves all connections of a worker, each in a greenlet. Nothing is
monkey-patched: only the sockets of clients are gevent's. Calls that block (a sync, a
database, a lock) run in threads, to which ``GeventScheduler`` sends them for the store.
So the store is the same code under every server, and no library runs with sockets and
locks that it was not written for. (``ssl`` is the exception, and only if TLS is
configured: gunicorn makes its context, and would make a blocking one.)

The additions:

*Time limits.* A client has ``REQUEST_TIMEOUT`` to send a whole request, and to receive
each piece of an answer. gunicorn limits only the time between two requests: a client
that sends a byte a minute would keep its connection forever.

*Closing.* Before a connection is closed, the rest of what the client sends is read for
a moment. A connection that is closed with unread bytes is reset, and the client may
lose the last answer (RFC 9112, section 9.6).

*Turns.* Clients are served in the order of their requests, and after each request of a
pipeline other connections are served first.

*Spreading.* All workers wait at one socket, and the first to wake accepts: a few kept
connections often end up at one worker while another idles. The usual remedy, a socket
for each worker (``reuse_port``), spreads by a hash, which is even only for many
connections; it no longer refuses a second server on the port; and connections that wait
at the socket of a worker that stops are reset. Here a worker that has more connections
than another leaves a new one to the others for a moment.

*Errors* that gunicorn answers itself are JSON, with a request id, and have a line in
the log.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import resource
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import gevent
from gevent import monkey
from gevent.hub import Waiter
from gevent.lock import Semaphore
from gevent.pool import Pool
from gevent.server import StreamServer
from gevent.socket import socket as GeventSocket
from gevent.socket import wait_read
from gevent.util import wrap_errors
from greenlet import getcurrent
from gunicorn.workers.ggevent import GeventWorker

from serving import internals
from web import errors, middleware

Result = TypeVar('Result')

logger = logging.getLogger('plants')

# ---- time limits, in seconds

# For one request, from its first byte to the end of its body.
REQUEST_TIMEOUT = 30
# For a client to take its last answer, and for one that is idle when the worker stops.
LINGER = 2
# Bytes a second that a client must send to be listened to for longer than LINGER.
LINGER_RATE = 256 * 1024
# How often the worker looks for clients whose time is up, and how often as it stops.
EXPIRE_EVERY = 1.0
EXPIRE_AT_END = 0.1
# How long a worker with more connections leaves a new one to the others, and how often
# it does so before it accepts: the others may be in the middle of a turn.
STAND_BACK = 0.001
STAND_BACKS = 5

# ---- sizes, in bytes

# The longest head of a request. An unfinished head is held in memory.
MAX_HEAD = 32 * 1024
# Answers that are buffered before they are sent: a client may send many requests and
# read none of the answers.
MAX_BUFFERED = 64 * 1024

# The number of workers whose connections are counted.
SLOTS = 256
NOT_SERVING = 2**32 - 1


class GeventScheduler:
    """How greenlets wait in a store (``store.scheduler.Scheduler``)."""

    def give_way(self) -> bool:
        """Serve the connections that have sent something."""
        poll_sockets()
        return True

    def waiter(self) -> GreenletWaiter:
        return GreenletWaiter()

    def call(self, function: Callable[[], Result]) -> Result:
        # NOTE: gevent would print the traceback of an exception.
        call = wrap_errors(BaseException, function)
        result: Result | BaseException = gevent.get_hub().threadpool.apply(call)
        if isinstance(result, BaseException):
            raise result
        return result

    def lock(self) -> AbstractContextManager[Any]:
        semaphore: AbstractContextManager[Any] = Semaphore()
        return semaphore


class GreenletWaiter:
    """A greenlet that waits for another greenlet of its thread."""

    def __init__(self) -> None:
        self._hub = gevent.get_hub()
        self._greenlet = getcurrent()
        self._woken = False

    def wait(self) -> None:
        while not self._woken:
            self._hub.switch()

    def wake(self) -> None:
        self._woken = True
        self._hub.loop.run_callback(self._greenlet.switch)


def poll_sockets() -> None:
    """Return when the event loop has polled its sockets and called their watchers."""
    hub = gevent.get_hub()
    waiter = Waiter(hub)
    # NOTE: not sleep(0), which returns before the loop polls the sockets; nor idle(),
    # which clients without a token can delay, and which gathers all connections in one
    # batch, so that no other request is served during its sync.
    check, idle = _after_sockets(hub.loop)
    check.start(waiter.switch, None)
    idle.start(int)
    try:
        waiter.get()
    finally:
        check.close()
        idle.close()


def _after_sockets(loop: Any) -> tuple[Any, Any]:
    """Return two watchers of an event loop.

    The first one is called each time the loop has polled its sockets and called their
    watchers. The second one keeps the loop from sleeping.
    """
    check, idle = loop.check(), loop.idle()
    check.priority = idle.priority = loop.MINPRI
    return check, idle


class Turns:
    """Decides which greenlets go on when the event loop has polled its sockets.

    First all whose clients have sent something, in the order in which they did. The
    loop itself reports the latest first: a client that is answered early would be
    served late the next time, and some requests take twice as long as others.

    Then one greenlet whose client has pipelined its next request. So it waits for the
    clients that have just sent one, however many clients pipeline. (``sleep(0)`` would
    take turns among those that pipeline first.)

    Args:
        loop: The event loop.
    """

    def __init__(self, loop: Any) -> None:
        self._arrived: list[Any] = []
        self._pipelined = deque[Any]()
        self._check, self._idle = _after_sockets(loop)
        self._check.priority += 1  # before poll_sockets() returns
        self._check.start(self._next)

    def wait_for_data(self, readable: Any) -> None:
        """Return when a watcher has reported its socket."""
        readable.start(self._arrived.append, getcurrent())
        try:
            gevent.get_hub().switch()
        finally:
            readable.stop()

    def wait_for_others(self) -> None:
        """Return when it is the turn of this greenlet, which has a request to read."""
        if not self._pipelined:
            self._idle.start(int)
        self._pipelined.append(getcurrent())
        gevent.get_hub().switch()

    def _next(self) -> None:
        while self._arrived:
            self._arrived.pop().switch()
        if self._pipelined:
            self._pipelined.popleft().switch()
            if not self._pipelined:
                self._idle.stop()


class ClientGone(OSError):
    """A connection has failed, and not a file, for example, of the application."""


class Client:
    """A client's socket, with a time limit for everything that waits for the client.

    Answers are buffered until the worker waits for the client.

    Args:
        sock: The connection.
        turns: How this greenlet waits for the client's next request.

    Attributes:
        deadline: When the client is expired, in seconds on the monotonic clock.
        is_idle: Whether the next byte begins a request.
        has_ended: Whether the client has sent its last byte, or is expired.
    """

    def __init__(self, sock: GeventSocket, turns: Turns) -> None:
        self._sock = sock
        self._turns = turns
        self._readable = gevent.get_hub().loop.io(sock.fileno(), 1)
        self._waits_before_read = True
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._head_size: float = 0
        self._is_sending = False
        self.has_ended = False
        self.expect_request(REQUEST_TIMEOUT)

    def start_tls(self, context: Any) -> None:
        """Make the handshake, if there is one to make.

        Raises:
            OSError: It failed.
        """
        # NOTE: in two steps, so that expire() finds the socket during the handshake.
        self._sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        self._waits_before_read = False  # the rest of a record may be in the socket
        self._sock.do_handshake()

    def expect_request(self, seconds: float) -> None:
        """Give the client time to begin a request."""
        self.is_idle = True
        self._head_size = 0
        self.deadline = time.monotonic() + seconds

    def begin_request(self) -> None:
        """Give the client time to send the rest of a request."""
        self.is_idle = False
        self._head_size = 0
        self.deadline = time.monotonic() + REQUEST_TIMEOUT

    def end_head(self) -> None:
        """Note that the body follows, which has limits of its own."""
        self._head_size = -math.inf

    def recv(self, size: int) -> bytes:
        """Receive bytes; none at the end of the stream and after the time limit.

        Raises:
            ClientGone: The connection has failed.
            LimitRequestHeaders: The head of a request becomes too long.
        """
        if self._buffer:
            self.flush()
        if self._head_size >= MAX_HEAD:
            raise internals.LimitRequestHeaders('the head is too long')
        if self.is_idle and self._waits_before_read:
            self._turns.wait_for_data(self._readable)  # a read would find nothing
        try:
            data: bytes = b'' if self.has_ended else self._sock.recv(size)
        except OSError as ex:
            raise ClientGone from ex
        self.has_ended = not data
        if self.is_idle and data:
            self.begin_request()
        self._head_size += len(data)
        return data

    def sendall(self, data: bytes) -> None:
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered > MAX_BUFFERED:
            self.flush()

    send = sendall

    def flush(self) -> None:
        """Send the buffered answers.

        Raises:
            ClientGone: The connection has failed.
        """
        buffer, self._buffer = self._buffer, []
        if self._buffered <= MAX_BUFFERED:
            buffer = [b''.join(buffer)]  # else without a copy: large data is shared
        self._buffered = 0
        deadline, self._is_sending = self.deadline, True
        try:
            for data in buffer:
                rest = memoryview(data)
                while rest:
                    self.deadline = time.monotonic() + REQUEST_TIMEOUT
                    rest = rest[self._sock.send(rest) :]
        except OSError as ex:
            raise ClientGone from ex
        finally:
            self._is_sending = False
            self.deadline = deadline

    def linger(self) -> None:
        """Let the client receive its last answer, and read the rest of what it sends.

        A client that sends a whole request before it reads must not be reset.
        """
        self.flush()
        self._raw_socket.shutdown(socket.SHUT_WR)
        self.is_idle = False
        self.end_head()
        began = time.monotonic()
        self.deadline = began + LINGER
        received = 0
        while data := self.recv(65_536):
            received += len(data)
            more = min(LINGER + received / LINGER_RATE, REQUEST_TIMEOUT)
            self.deadline = began + more
            gevent.sleep(0)

    def expire(self) -> None:
        """End all waits for the client: a read finds the end, a send fails."""
        self.has_ended = True
        self.deadline = math.inf
        with suppress(OSError):  # the connection has ended already
            self._raw_socket.shutdown(
                socket.SHUT_RDWR if self._is_sending else socket.SHUT_RD
            )

    def shutdown(self, how: int) -> None:
        """End the connection: gunicorn has begun an answer that it cannot finish."""
        self.flush()
        self._raw_socket.shutdown(how)

    def close(self) -> None:
        self._readable.close()
        self._sock.close()

    @property
    def _raw_socket(self) -> Any:
        # NOTE: TLS has a shutdown of its own, which another greenlet must not begin.
        return self._sock._sock


class PlantsWorker(GeventWorker):  # type: ignore[misc]
    """gunicorn's gevent worker, with the additions of this module.

    Attributes:
        number: The smallest number that no other worker has.
    """

    alive: bool
    sockets: list[Any]
    # How many connections each worker has, in memory that all workers share.
    connection_counts: memoryview | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if PlantsWorker.connection_counts is None:
            counts = memoryview(mmap.mmap(-1, 4 * SLOTS)).cast('I')
            counts[:] = array('I', [NOT_SERVING]) * SLOTS
            PlantsWorker.connection_counts = counts
        self._counts = PlantsWorker.connection_counts
        self.number = 0
        self._connections = 0
        self._clients: set[Client] = set()
        self._tls: Any = None
        self._turns: Turns

    def forget_connections(self) -> None:
        """Take this worker out of the counts; for the master, when it has ended."""
        self._counts[self.number % SLOTS] = NOT_SERVING

    def patch(self) -> None:
        if self.cfg.is_ssl:
            monkey.patch_ssl()
        self.sockets = [
            GeventSocket(family, socket.SOCK_STREAM, fileno=number)
            for family, number in internals.listening_sockets(self)
        ]

    def run(self) -> None:
        # Usually 1,024 files may be open, and each connection is one.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # In seconds. A thread that comes back from a sync waits so long for the GIL.
        sys.setswitchinterval(0.0002)
        internals.remember_settings(self.cfg)
        self._exchanges = internals.Exchanges(self.cfg)
        loop = gevent.get_hub().loop
        self._turns = Turns(loop)
        if self.cfg.is_ssl:
            self._tls = internals.ssl_context(self.cfg)
        pool = Pool(self.worker_connections)
        servers = [Acceptor(self, listener, pool) for listener in self.sockets]
        for server in servers:
            server.start()
        self.count_connection(0)
        while self.alive:
            self.notify()
            self._expire_clients()
            self._sleep(EXPIRE_EVERY)
        for server in servers:
            server.close()
        self.forget_connections()
        end = time.monotonic() + LINGER
        give_up = time.monotonic() + self.cfg.graceful_timeout
        # NOTE: the greenlets, not the clients: a connection that was accepted in this
        # turn of the event loop has a greenlet already, and becomes a client later.
        while len(pool) and time.monotonic() < give_up:
            self.notify()
            self._expire_clients(idle_until=end)
            self._sleep(EXPIRE_AT_END)

    def handle(self, listener: Any, sock: GeventSocket, address: Any) -> None:
        """Serve a connection from its beginning to its end."""
        client = Client(sock, self._turns)
        self._clients.add(client)
        request = None
        try:
            try:
                if self._tls is not None:
                    client.start_tls(self._tls)
                for request in self._exchanges.requests(client, address, listener):
                    client.end_head()
                    self.handle_request(listener, request, client, address)
                    self._end_request(request, client)
                    request = None
            except StopIteration:
                pass  # the answer announced the end of the connection
            except OSError:
                raise
            except Exception as ex:
                self.handle_error(request, client, address, ex)
            client.linger()
        except OSError:
            pass  # the client is gone
        except Exception:
            # Whatever the fault, only this connection ends.
            self.log.exception('a connection was lost')
        finally:
            self._clients.discard(client)
            client.close()
            self.count_connection(-1)

    def handle_request(
        self, listener: Any, request: Any, client: Client, address: Any
    ) -> None:
        """Have the application answer a request.

        It is gunicorn's method, with an environment that need not be made each time.

        Raises:
            StopIteration: The answer announced the end of the connection.
            ClientGone: The connection has failed.
        """
        began = time.monotonic()
        self.cfg.pre_request(self, request)
        response, environ = self._exchanges.respond(request, listener)
        self.nr += 1
        if self.nr >= self.max_requests and self.alive:
            self.log.info('max_requests is reached: the worker stops')
            self.alive = False
        if not self.alive or not self.cfg.keepalive:
            response.force_close()
        try:
            try:
                self._answer(request, response, environ, began)
            finally:
                self.cfg.post_request(self, request, environ, response)
        except ClientGone:
            raise
        except Exception as ex:
            if response.headers_sent:
                self.log.exception('an answer was broken off')
                client.shutdown(socket.SHUT_RDWR)
            else:
                self.handle_error(request, client, address, ex)
            raise StopIteration from ex
        if response.should_close():
            raise StopIteration

    def _answer(
        self, request: Any, response: Any, environ: dict[str, Any], began: float
    ) -> None:
        body = self.wsgi(environ, response.start_response)
        try:
            for data in body:
                response.write(data)
            response.close()
        finally:
            took = timedelta(seconds=time.monotonic() - began)
            self.log.access(response, request, environ, took)
            if hasattr(body, 'close'):
                body.close()

    def _end_request(self, request: Any, client: Client) -> None:
        internals.discard_body(request)
        if internals.has_more(request):
            client.begin_request()
            self._turns.wait_for_others()
        else:
            client.expect_request(self.cfg.keepalive if self.alive else LINGER)

    def handle_error(
        self, request: Any, client: Client, address: Any, error: Exception
    ) -> None:
        """Answer a request that does not reach the application, or made it fail.

        The log does not repeat the request: there may be a token in it.
        """
        id = middleware.new_request_id()
        status = internals.status_of(error)
        if status < 500:
            self.log.warning('%s: request refused: %s', id, type(error).__name__)
        else:
            self.log.error('%s: request failed', id, exc_info=error)
        message = f'{status.phrase}: the HTTP server cannot serve this request'
        body = errors.error_body(100 * status, message)
        head = (
            f'HTTP/1.1 {status} {status.phrase}\r\n'
            f'Date: {internals.http_date()}\r\n'
            f'Connection: close\r\n'
            f'Content-Type: application/json\r\n'
            f'Content-Length: {len(body)}\r\n'
            f'X-Request-Id: {id}\r\n'
            f'\r\n'
        )
        client.sendall(head.encode() + body)

    def must_stand_back(self) -> bool:
        """Whether another worker should have the next connection.

        Few connections are spread evenly; many may differ by a sixteenth.
        """
        mine = self._connections
        return bool(mine > min(self._counts) + mine // 16)

    def count_connection(self, change: int) -> None:
        """Tell the others that a connection was accepted (1) or has ended (-1)."""
        self._connections += change
        if self.alive:
            self._counts[self.number % SLOTS] = self._connections

    def _expire_clients(self, idle_until: float = math.inf) -> None:
        poll_sockets()  # first hear the clients, if this process was paused
        now = time.monotonic()
        for client in list(self._clients):
            if client.deadline < now or (client.is_idle and idle_until < now):
                client.expire()

    def _sleep(self, seconds: float) -> None:
        """Sleep until a signal comes; its handler has run then."""
        with suppress(TimeoutError):
            wait_read(internals.signal_pipe(self), seconds)
            with suppress(BlockingIOError):
                os.read(internals.signal_pipe(self), 4096)


class Acceptor(StreamServer):  # type: ignore[misc]
    """Accepts connections, unless another worker should."""

    max_accept = 16

    def __init__(self, worker: PlantsWorker, listener: GeventSocket, pool: Pool):
        self._worker = worker
        self._stood_back = 0
        name = listener.getsockname()
        super().__init__(
            listener,
            handle=lambda sock, address: worker.handle(name, sock, address),
            spawn=pool,
        )

    def do_read(self) -> Any:
        if not self._worker.must_stand_back():
            self._stood_back = 0
        elif self._stood_back < STAND_BACKS:
            self._stood_back += 1
            self._pause()
            return None
        else:
            self._stood_back -= 1  # the others may be stuck: wait less next time
        try:
            accepted = super().do_read()
        except OSError:
            self._pause()  # too many open files: other connections must close first
            return None
        if accepted:
            self._worker.count_connection(1)
        return accepted

    def _pause(self) -> None:
        self.stop_accepting()
        self._timer = self.loop.timer(STAND_BACK)
        self._timer.start(self._start_accepting_if_started)
