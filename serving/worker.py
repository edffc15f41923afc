"""The worker: gunicorn's gevent worker, with connections of our own.

Nothing is monkey-patched: no library runs with sockets and locks that it was not
written for. Only the sockets of the server are gevent's.
"""

import gc
import os
import resource
import time
from contextlib import suppress
from typing import Any

import gevent
from gevent import socket
from gevent.lock import Semaphore
from gunicorn.http.wsgi import base_environ
from gunicorn.util import http_date
from gunicorn.workers.ggevent import GeventWorker

from serving.connection import LINGER, Connection
from serving.log import PlantsLogger
from serving.scheduler import poll

FILES = 32  # that a worker may have open, besides one for each connection
TICK = 0.2  # seconds between two looks for late clients, and for a signal to stop
LINES = 100  # of the log that may wait so long, to be written together
# A worker that has accepted a connection leaves the next to others for so long: all
# wait at one socket, and some kept connections often ended up at one worker.
ACCEPT_PAUSE = 0.001
# Bytes of an answer that wait in the kernel, which doubles the number. It would grow to
# 4 MiB for a client that reads nothing, in memory that no limit of a worker counts.
SEND_BUFFER = 48 * 1024
# What is not known of a request whose first line cannot be read.
UNREADABLE = 'REQUEST_METHOD', 'RAW_URI', 'PATH_INFO', 'SERVER_PROTOCOL'


class PlantsWorker(GeventWorker):  # type: ignore[misc]
    """gunicorn's gevent worker, with our connections."""

    alive: bool
    worker_connections: int
    sockets: list[Any]

    def patch(self) -> None:
        for at, each in enumerate(self.sockets):
            listener = socket.socket(each.FAMILY, fileno=each.sock.detach())
            # The sockets of clients inherit it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            self.sockets[at] = listener

    def run(self) -> None:
        self._prepare()
        accepting = [gevent.spawn(self._accept, each) for each in self.sockets]
        self.tmp.notify()  # the master looks for it
        try:
            while self.alive and all(accepting):  # none has failed
                self._tick()
            self._stop()
        finally:
            # However the worker ends, by SystemExit, too: the store is closed next, and
            # no request may meet that.
            for each in self.sockets:
                each.close()
            for connection in self.connections:
                with suppress(OSError):  # the client is gone; without a word of TLS
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
            gevent.sleep(0)  # which closes the sockets that a greenlet still waits for

    def _prepare(self) -> None:
        """Set up the process, and what all connections share."""
        # The garbage collector would write to each object of the master: with 450
        # connections a worker would have 24 MiB of its own instead of 14.
        gc.freeze()
        # A full worker makes room; one that cannot open another file could not.
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = most - FILES - len(self.sockets)
        self.worker_connections = max(1, min(self.worker_connections, room))
        PlantsLogger.buffer.capacity = LINES  # ``self.log`` may be of another class
        self.connections: set[Connection] = set()
        self.pipelining = Semaphore()  # for clients that have sent the next request
        self.keepalive = self.cfg.keepalive
        self.plants = self.app.wsgi()  # ``wsgi`` may be wrapped, and may have failed

    def _tick(self) -> None:
        """Wait, tell the master that the worker lives, and have late waits ended."""
        self.date = http_date()  # of answers: not formatted for each
        gevent.sleep(TICK)
        PlantsLogger.buffer.flush()
        if self.ppid != os.getppid() and self.alive:
            self.log.info('the master is gone: the worker stops')
            self.alive = False
        for _ in range(4):  # after a pause of this process: first see who has sent
            self.tmp.notify()
            poll()  # one reports 64 sockets at most, the next twice as many
        gevent.get_hub().loop.run_callback(self._end_waits)

    def _end_waits(self) -> None:
        """End the waits whose time has passed; a callback of the event loop."""
        now = time.monotonic()
        late = {each for each in self.connections if each.since + each.limit < now}
        if len(self.connections) >= self.worker_connections:
            stalled = [each for each in self.connections if each.since < now - LINGER]
            stalled.sort(key=lambda each: (not each.is_idle, each.since))
            late |= {*stalled[: 1 + len(stalled) // 4]}
        for each in late:
            each.greenlet.throw(TimeoutError)

    def _stop(self) -> None:
        """Let clients take the answers to what they have begun, within a time limit."""
        for each in self.sockets:
            each.close()
        began = time.monotonic()
        for each in self.connections:
            if each.is_idle:  # it may send one more request, but soon
                each.since, each.limit = began, LINGER
        while self.connections and time.monotonic() < began + self.cfg.graceful_timeout:
            self._tick()

    def _accept(self, listener: Any) -> None:
        """Accept the connections of a listening socket; a greenlet."""
        name = listener.getsockname()
        host, port = name[:2] if isinstance(name, tuple) else ('localhost', '')
        environ: dict[str, Any] = base_environ(self.cfg) | {
            **dict.fromkeys(UNREADABLE, '-'),
            'SCRIPT_NAME': os.environ.get('SCRIPT_NAME', ''),
            'SERVER_NAME': host,
            'SERVER_PORT': str(port),
            'wsgi.multithread': True,
            'wsgi.url_scheme': 'https' if self.plants.tls else 'http',
        }
        free = 0.0  # until when connections are accepted without a pause
        while True:
            while len(self.connections) >= self.worker_connections:
                gevent.sleep(TICK)  # another worker may accept the next
            try:
                sock, name = listener.accept()
            except OSError:  # no descriptor is left
                gevent.sleep(TICK)
                continue
            host, port = name[:2] if isinstance(name, tuple) else (name or '', '')
            client = {'REMOTE_ADDR': host, 'REMOTE_PORT': str(port)}
            self.connections.add(Connection(self, sock, environ | client))
            began = time.monotonic()
            if began > free:
                gevent.sleep(ACCEPT_PAUSE)
                now = time.monotonic()
                # More than one if a turn of the event loop takes longer than the pause.
                free = now + (now - began) / 40
