"""The worker: gunicorn's gevent worker. It limits clients, and spreads connections.

Nothing is monkey-patched: no library runs with sockets and locks that it was not
written for. The sockets of clients are non-blocking: ``client`` waits for them.

All workers wait at one socket, and the first to wake accepts: a few kept connections
often end up at one worker while another idles (4 clients: 2,880 adds a second in the
worst case, 7,080 if they are spread). So a worker with more connections than another
leaves a new one to the others for a moment.
"""

import gc
import resource
import select
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from http import HTTPStatus
from typing import Any

import gevent
from gevent.pool import Pool
from gevent.socket import wait_read
from gunicorn.http.errors import NoMoreData
from gunicorn.sock import ssl_context
from gunicorn.workers.ggevent import GeventWorker

from app import PlantsApp
from serving.client import BODY, HEAD, IDLE, LINGER, Client, ClientGone
from serving.heads import STATUSES, Exchanges, Response, StrictRequest
from serving.log import PlantsLogger
from serving.master import connection_counts
from serving.scheduler import Turns
from web.errors import FAULT, Fault
from web.middleware import RequestLog

OPEN_MAX = 10_240  # files; macOS refuses more, though its limit is called unlimited
TICK = 0.2  # seconds between two checks for a signal to stop, and for late clients
# Bytes of an answer that wait in the kernel, which doubles the number. It would grow to
# 4 MiB for a client that reads nothing, in memory that no limit of a worker counts.
SEND_BUFFER = 48 * 1024
# How many seconds a worker with more connections leaves a new one to the others, and
# how often before it accepts: the others may be in the middle of a turn.
STAND_BACK, STAND_BACKS = 0.001, 5
STOPPING = 2**31  # added to the count of a worker that stops: others have fewer


class PlantsWorker(GeventWorker):  # type: ignore[misc]
    """gunicorn's gevent worker, with our limits, our parser and our log."""

    alive: bool

    # The life of the worker, in the main greenlet.

    def patch(self) -> None:
        for each in self.sockets:  # the sockets of clients inherit it
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    def run(self) -> None:
        self._prepare()
        self._serve()
        self._stop()

    def _prepare(self) -> None:
        """Set up the process, and what all connections share."""
        # The garbage collector would write to each object of the master: with 450
        # connections a worker would have 24 MiB of its own instead of 14.
        gc.freeze()
        # Usually 1,024 files may be open, and each connection is one.
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        for higher in most, max(limit, OPEN_MAX):
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (higher, most))
                break
        sys.setswitchinterval(0.00005)  # seconds that a thread waits for the GIL
        # As plain attributes: gunicorn's way to read them takes 5 to 10 % of the CPU.
        settings = self.cfg.settings.items()
        self.cfg.__dict__.update((name, setting.get()) for name, setting in settings)
        if isinstance(self.log, PlantsLogger):
            self.log.batching.batch_with(gevent.get_hub().loop)
        self._tls = ssl_context(self.cfg) if self.cfg.is_ssl else None
        self._exchanges = Exchanges(self.cfg)
        # This application answers the requests that ours must not serve.
        is_ours = isinstance(self.wsgi, PlantsApp)
        self._refusals = self.wsgi if is_ours else PlantsApp([RequestLog()])
        self._turns = Turns()
        self._pool = Pool(self.worker_connections)  # a greenlet for each connection
        self._clients: set[Client] = set()
        self._room = 0  # how many stalled clients may be expired at once
        self._slot = self.age % len(connection_counts)
        connection_counts[self._slot] = 1

    def _serve(self) -> None:
        """Accept connections, and limit them, until the worker is to stop."""
        accepting = [
            gevent.spawn(self._accept, each, each.getsockname())
            for each in self.sockets
        ]
        while self.alive and all(accepting):  # none has failed
            self._tick()
            self._make_room()
        gevent.killall(accepting)

    def _tick(self, *, idle_end: bool = False) -> None:
        """Tell the master that the worker lives, wait, expire late clients."""
        self.notify()
        gevent.sleep(TICK)
        # First read what clients have sent: this process may have been paused.
        self._turns.wait_for_others(is_next=True)
        now = time.monotonic()
        for client in list(self._clients):
            if client.deadline < now or (idle_end and client.stage == IDLE):
                client.expire()

    def _make_room(self) -> None:
        """Expire stalled clients if others wait for a connection of a full worker."""
        if not select.select(self.sockets, [], [], 0)[0]:
            self._room = 0
        elif self._pool.full():
            # More each time while others wait, because their number is not known.
            self._room = (2 * self._room) or (1 + self._pool.size // 16)
            awaited = [client for client in self._clients if client.is_awaited]
            stalled = [client for client in awaited if client.stalled_for() >= LINGER]
            stalled.sort(key=lambda client: (client.stage, client.since))
            for client in stalled[: self._room]:
                client.expire()

    def _stop(self) -> None:
        """Let clients take the answers to what they have begun, within a time limit."""
        for each in self.sockets:
            each.close()
        connection_counts[self._slot] += STOPPING
        stopped = time.monotonic()
        # NOTE: the greenlets, not the clients: a connection that was accepted in this
        # turn of the event loop has a greenlet already, and becomes a client later.
        last = stopped + self.cfg.graceful_timeout
        while len(self._pool) and time.monotonic() < last:
            self._tick(idle_end=time.monotonic() > stopped + LINGER)

    # A greenlet for each listening socket.

    def _accept(self, listener: Any, address: Any) -> None:
        """Accept connections, but leave one for a moment to a worker with fewer."""
        while True:
            for _ in range(STAND_BACKS):
                wait_read(listener.fileno())
                self._pool.wait_available()
                mine = connection_counts[self._slot]
                fewest = min(filter(None, connection_counts))
                if mine <= fewest + mine // 16:  # few are spread evenly, many roughly
                    break
                gevent.sleep(STAND_BACK)
            try:
                sock, peer = listener.accept()
            except OSError as ex:  # another worker was faster, or no descriptor is left
                gevent.sleep(0 if isinstance(ex, BlockingIOError) else STAND_BACK)
                continue
            connection_counts[self._slot] += 1
            sock.setblocking(False)
            self._pool.spawn(self.handle, address, sock, peer)

    # A greenlet for each connection.

    def handle(self, listener: Any, sock: socket.socket, address: Any) -> None:
        client = Client(sock, self._turns)
        self._clients.add(client)
        try:
            if self._tls is not None:
                client.start_tls(self._tls)
            for request in self._exchanges.requests(client, address, listener):
                if not self._answer(request, client):
                    del request  # nothing of it is kept while the client is slow
                    break
                if request.finish():
                    client.begin(HEAD)
                    self._turns.wait_for_others()
                else:
                    client.begin(IDLE, self.cfg.keepalive if self.alive else LINGER)
                del request
            client.linger()
        except OSError as ex:  # the client is gone
            if getattr(ex.__cause__, 'reason', '') == 'HTTP_REQUEST':
                self.log.warning('a connection was refused (HTTP to a port for HTTPS?)')
        except Exception:
            self.log.exception('a connection was lost')
        finally:
            self._clients.discard(client)
            client.close()
            connection_counts[self._slot] -= 1

    def _answer(self, request: StrictRequest, client: Client) -> bool:
        """Have the application answer a request; return whether others may follow."""
        began = time.monotonic()
        response = None
        try:
            request.read(self.cfg)
            client.stage = BODY
            self.cfg.pre_request(self, request)
            response, environ = self._exchanges.respond(request)
            self.nr += 1
            if self.nr >= self.max_requests and self.alive:
                self.log.info('max_requests is reached: the worker stops')
                self.alive = False
            try:
                body = self.wsgi(environ, response.start_response)
                # Decided only now: the worker may stop while the request is read.
                is_last = not self.alive or not self.cfg.keepalive
                if is_last and not response.headers_sent:
                    response.force_close()
                try:
                    for data in body:
                        response.write(data)
                    response.close()
                finally:
                    took = timedelta(seconds=time.monotonic() - began)
                    self.log.access(response, request, environ, took)
                    if hasattr(body, 'close'):
                        body.close()
            finally:
                self.cfg.post_request(self, request, environ, response)
        except (ClientGone, NoMoreData):
            raise
        except Exception as ex:
            if response and response.headers_sent:
                self.log.exception('an answer ended too early')
            else:
                self._refuse(request, client, ex)
            return False
        return not response.should_close()

    def _refuse(self, request: StrictRequest, client: Client, error: Exception) -> None:
        """Answer a request that the application does not serve, or failed to serve."""
        kinds = type(error).__mro__
        status = HTTPStatus(next(STATUSES[kind] for kind in kinds if kind in STATUSES))
        message = f'{status.phrase}: the HTTP server cannot serve this request'
        environ = request.refuse() | {FAULT: Fault(100 * status, message)}
        response = Response(request, client, self.cfg)
        body = self._refusals(environ, response.start_response)
        id = dict(response.headers)['x-request-id']
        if status < 500:
            kind = type(error).__name__  # its text may have a token
            hint = ' (HTTPS to a port for HTTP?)' if client.looks_like_tls else ''
            self.log.warning('%s: request refused: %s%s', id, kind, hint)
        else:
            self.log.error('%s: request failed', id, exc_info=error)
        for data in body:
            response.write(data)
        response.close()
