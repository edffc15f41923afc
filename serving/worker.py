"""The worker: gunicorn's gevent worker, with connections of our own.

With gunicorn's, and its C parser ``gunicorn_h1c``, 16 and 64 connections have 0.59 and
0.36 of the adds a second, and slow clients have no limits. Nothing is monkey-patched:
no library runs with sockets and locks that it was not written for.
"""

import gc
import mmap
import os
import resource
import time
from contextlib import suppress
from typing import Any

import gevent
from gevent import socket
from gunicorn.http.wsgi import base_environ
from gunicorn.util import http_date
from gunicorn.workers.ggevent import GeventWorker

from serving.connection import LINGER, Connection, Server
from serving.log import PlantsLogger
from serving.scheduler import poll

FILES = 32  # that a worker may have open, besides one for each connection
TICK = 0.2  # seconds between two looks for late clients, and for a signal to stop
LINES = 100  # of the log that may wait so long, to be written together
SEND_BUFFER = 48 * 1024  # bytes for each client in the kernel, or it takes 4 MiB
# What is not known of a request whose first line cannot be read.
UNREADABLE = 'REQUEST_METHOD', 'RAW_URI', 'PATH_INFO', 'SERVER_PROTOCOL'

# Connections go in blocks to the first worker with the fewest whole blocks: few clients
# share the batches of one worker, and so its syncs; many are spread.
BLOCK = 8  # connections
LEAVE = 0.005  # seconds to leave a connection to the worker that is next
PLACES = 64  # of workers, by their age; two that share one only spread worse
# In shared memory: how many active ones a worker has, and until when it accepts more.
_shared = memoryview(mmap.mmap(-1, 16 * PLACES)).cast('d')
COUNTS, ACCEPTS_UNTIL = _shared[:PLACES], _shared[PLACES:]


class PlantsWorker(GeventWorker):  # type: ignore[misc]
    """gunicorn's gevent worker, with our connections."""

    alive: bool

    def patch(self) -> None:
        for at, each in enumerate(self.sockets):
            listener = socket.socket(each.FAMILY, fileno=each.sock.detach())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            listener.setblocking(False)
            self.sockets[at] = listener

    def run(self) -> None:
        self._prepare()
        accepting = [gevent.spawn(self._accept, each) for each in self.sockets]
        self.tmp.notify()  # the master looks for it
        try:
            try:
                while self.alive and all(accepting):  # none has failed
                    self._tick()
            finally:
                gevent.killall(accepting)  # nobody may wait for a closed socket
                for each in self.sockets:
                    each.close()
            self.server.keepalive = 0
            for each in self.server.connections:
                if each.is_idle:  # it may send one more request, but soon
                    each.limit(LINGER)
            until = time.monotonic() + self.cfg.graceful_timeout
            while self.server.connections and time.monotonic() < until:
                self._tick()
        finally:
            # Also at SystemExit: no request may meet a closed store, which comes next.
            for each in self.server.connections:
                with suppress(OSError):  # the client is gone; without a word of TLS
                    socket.socket.shutdown(each.sock, socket.SHUT_RDWR)
            gevent.sleep(0)  # which closes the sockets that a greenlet still waits for

    def _prepare(self) -> None:
        """Set up the process, and what all connections share."""
        gc.freeze()  # or collections would copy 10 MiB of the objects of the master
        # A full worker makes room; one that cannot open another file could not.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        PlantsLogger.buffer.capacity = LINES  # ``self.log`` may be of another class
        plants = self.app.wsgi()  # ``self.wsgi`` may be wrapped
        self.server = Server(
            application=self.wsgi,
            plants=plants,
            max_body_bytes=plants.max_body_bytes,
            tls=plants.tls,
            log_error=self.log.error,
            log_access=self.log.access if self.log.access_log_enabled else None,
            max_connections=max(1, min(self.worker_connections, files - FILES)),
            requests_left=self.max_requests,
            keepalive=self.cfg.keepalive,
        )

    def _tick(self) -> None:
        """Wait, tell others that the worker lives, and have late waits ended."""
        self.server.date = http_date()
        self._is_next()
        gevent.sleep(TICK)
        PlantsLogger.buffer.flush()
        if self.ppid != os.getppid() and self.alive:  # gunicorn would exit at once
            self.log.info('the master is gone: the worker stops')
            self.alive = False
        self.alive = self.alive and self.server.requests_left > 0
        for _ in range(4):  # after a pause of this process: first see who has sent
            self.tmp.notify()
            poll()  # one reports 64 sockets at most, the next twice as many
        gevent.get_hub().loop.run_callback(self.server.end_waits)

    def _accept(self, listener: Any) -> None:
        """Accept the connections of a listening socket; a greenlet."""
        name = listener.getsockname()
        host, port = name[:2] if isinstance(name, tuple) else ('localhost', '')
        mount = os.environb.get(b'SCRIPT_NAME', b'').decode('latin-1').strip('/')
        environ: dict[str, Any] = base_environ(self.cfg) | {
            **dict.fromkeys(UNREADABLE, '-'),
            'SCRIPT_NAME': mount and f'/{mount}',
            'SERVER_NAME': host,
            'SERVER_PORT': str(port),
            'wsgi.url_scheme': 'https' if self.cfg.is_ssl else 'http',
        }
        while True:
            while self.server.is_full():
                gevent.sleep(TICK)  # another worker may accept the next
            if not (self._is_next() or self.cfg.reuse_port):  # a queue of its own
                gevent.sleep(LEAVE)
            try:
                sock, at = listener.accept()
            except BlockingIOError:
                socket.wait_read(listener.fileno())
            except OSError:  # no descriptor is left
                gevent.sleep(TICK)
            else:
                host = at[0] if isinstance(at, tuple) else ''
                Connection(self.server, sock, environ | {'REMOTE_ADDR': host})

    def _is_next(self) -> bool:
        """Tell the other workers of this one; return whether it accepts the next."""
        now, own = time.monotonic(), self.age % PLACES
        is_open = self.alive and not self.server.is_full()
        ACCEPTS_UNTIL[own] = now + 5 * TICK if is_open else 0
        COUNTS[own] = sum(now - each.heard < LINGER for each in self.server.connections)
        open = [place for place in range(PLACES) if ACCEPTS_UNTIL[place] > now]
        return bool(own == min(open, key=lambda at: COUNTS[at] // BLOCK, default=None))
