"""The worker: gunicorn's gevent worker, with connections of our own.

Nothing is monkey-patched: no library runs with sockets and locks that it was not
written for. The sockets of clients are non-blocking: their greenlets wait for them.
"""

import gc
import os
import resource
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

import gevent
from gevent.socket import wait_read
from gunicorn.sock import ssl_context
from gunicorn.workers.ggevent import GeventWorker

from app import PlantsApp
from serving.connection import LINGER, Connection
from serving.log import PlantsLogger
from serving.scheduler import Turns
from web.middleware import RequestLog

OPEN_MAX = 10_240  # files; macOS refuses more, though its limit is called unlimited
TICK = 0.2  # seconds between two looks for late clients, and for a signal to stop
FLUSH = 0.02  # seconds that a line of the log may wait for more lines
# A worker that has accepted a connection leaves the next to others for so long: all
# wait at one socket, and some kept connections often ended up at one worker.
ACCEPT_PAUSE = 0.001
MAX_BODY = 1024 * 1024  # bytes, for another application than ours
# Bytes of an answer that wait in the kernel, which doubles the number. It would grow to
# 4 MiB for a client that reads nothing, in memory that no limit of a worker counts.
SEND_BUFFER = 48 * 1024


class PlantsWorker(GeventWorker):  # type: ignore[misc]
    """gunicorn's gevent worker, with our connections."""

    alive: bool

    def patch(self) -> None:
        for each in self.sockets:  # the sockets of clients inherit it
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    def run(self) -> None:
        self.connections: set[Connection] = set()
        try:
            self._prepare()
            self._serve()
            self._stop()
        finally:
            # However the worker ends, by SystemExit, too: the store is closed next, and
            # no request may meet that.
            for each in self.sockets:
                each.close()
            for connection in self.connections:
                connection.shut()

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
        self.tls = ssl_context(self.cfg) if self.cfg.is_ssl else None
        self.turns = Turns()
        self.keepalive = self.cfg.keepalive
        self.logs_access = self.log.access_log_enabled
        # This application answers the requests that ours must not serve.
        is_ours = isinstance(self.wsgi, PlantsApp)
        self.refusals = self.wsgi if is_ours else PlantsApp([RequestLog()])
        if isinstance(self.log, PlantsLogger):
            buffer, call_later = self.log.buffer, gevent.spawn_later
            run = gevent.get_hub().loop.run_callback_threadsafe
            buffer.flush_soon = partial(run, call_later, FLUSH, buffer.flush)
        self.max_body = getattr(self.wsgi, 'max_body_bytes', MAX_BODY)

    def _serve(self) -> None:
        """Accept connections until the worker is to stop."""
        accepting = [gevent.spawn(self._accept, each) for each in self.sockets]
        while self.alive and all(accepting):  # none has failed
            self._tick()
        gevent.killall(accepting)

    def _tick(self) -> None:
        """Tell the master that the worker lives, wait, and end late waits."""
        self.tmp.notify()
        gevent.sleep(TICK)
        gevent.sleep(0.001)  # after a pause of this process: first see who has sent
        if self.ppid != os.getppid() and self.alive:
            self.log.info('the master is gone: the worker stops')
            self.alive = False
        now = time.monotonic()
        self._expire([each for each in self.connections if each.deadline < now])

    def _expire(self, late: list[Connection]) -> None:
        for connection in late:  # what has arrived meanwhile is read first
            gevent.get_hub().loop.run_callback(connection.expire)

    def _stop(self) -> None:
        """Let clients take the answers to what they have begun, within a time limit."""
        for each in self.sockets:
            each.close()
        for connection in self.connections:
            connection.hurry()
        last = time.monotonic() + self.cfg.graceful_timeout
        while self.connections and time.monotonic() < last:
            self._tick()

    def _accept(self, listener: Any) -> None:
        """Accept the connections of a listening socket; a greenlet."""
        environ, number = self._environ(listener.getsockname()), 1
        while True:
            wait_read(listener.fileno())
            began = time.monotonic()
            try:
                for _ in range(number):
                    while len(self.connections) >= self.worker_connections:
                        self._make_room()
                    sock, address = listener.accept()
                    self._connect(sock, address, environ)
            except BlockingIOError:  # there is no more, or another worker was faster
                pass
            except OSError:  # no descriptor is left, or the client is gone
                gevent.sleep(TICK)
            gevent.sleep(ACCEPT_PAUSE)
            # More than one if a turn of the event loop takes longer than the pause.
            number = 1 + int((time.monotonic() - began) / (4 * ACCEPT_PAUSE))

    def _connect(self, sock: Any, address: Any, environ: dict[str, Any]) -> None:
        sock.setblocking(False)
        if self.tls is not None:  # the first read makes the handshake
            how = {'server_side': True, 'do_handshake_on_connect': False}
            sock = self.tls.wrap_socket(sock, **how)
        host, port = address[:2] if isinstance(address, tuple) else (address or '', '')
        client = {'REMOTE_ADDR': host, 'REMOTE_PORT': str(port)}
        connection = Connection(self, sock, environ | client)
        self.connections.add(connection)
        gevent.spawn_raw(connection.run)

    def _make_room(self) -> None:
        """End the connection that waits longest for its client, an idle one first."""
        late = time.monotonic() - LINGER
        stalled = [each for each in self.connections if each.since < late]
        stalled = [each for each in stalled if each.deadline < float('inf')]
        if stalled:
            longest = min(stalled, key=lambda each: (not each.is_idle, each.since))
            longest.deadline = 0
            self._expire([longest])
        gevent.sleep(ACCEPT_PAUSE if stalled else TICK)

    def _environ(self, name: Any) -> dict[str, Any]:
        """Return what the environments of a listening socket have in common."""
        is_tcp = isinstance(name, tuple)
        return {
            'SCRIPT_NAME': os.environ.get('SCRIPT_NAME', ''),
            'SERVER_NAME': name[0] if is_tcp else 'localhost',
            'SERVER_PORT': str(name[1]) if is_tcp else '',
            'SERVER_SOFTWARE': 'gunicorn',
            'wsgi.version': (1, 0),
            'wsgi.url_scheme': 'https' if self.tls else 'http',
            'wsgi.errors': sys.stderr,
            'wsgi.input_terminated': True,
            'wsgi.multithread': True,
            'wsgi.multiprocess': self.cfg.workers > 1,
            'wsgi.run_once': False,
        }

    def count(self) -> None:
        """Count a request, and stop after the last one (``max_requests``)."""
        self.nr += 1
        if self.nr >= self.max_requests and self.alive:
            self.log.info('max_requests is reached: the worker stops')
            self.alive = False
