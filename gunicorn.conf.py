"""How gunicorn serves the plant store: `gunicorn` alone, in this directory.

Each setting is here because its default is wrong for this service. All of them give way
to the command line and to GUNICORN_CMD_ARGS. In the order of a server's life.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import socket
import sys
import time
from array import array
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gunicorn import util
from gunicorn.arbiter import Arbiter
from gunicorn.http import errors
from gunicorn.http.errors import ParseException
from gunicorn.http.message import Request
from gunicorn.workers.base import Worker
from gunicorn.workers.gthread import TConn
from gunicorn.workers.gthread import ThreadWorker

# ---- what to run

wsgi_app = 'app:app'
# A store that was opened before the fork would be shared by processes that do not know
# of each other. Ours opens after it all the same; this keeps its threads out of it too.
preload_app = False

# ---- processes and threads

if 'WEB_CONCURRENCY' not in os.environ:
    # One process can have a store in memory, and more would each have their own.
    memory = os.environ.get('PLANTS_STORE') == 'memory:'
    workers = 1 if memory else len(os.sched_getaffinity(0))
# A thread is held while a request is read, so this is how many slow clients it takes to
# keep a worker from the others. The pool grows when it must: a high bound is free.
threads = 300
worker_connections = 1_000
# In memory: a heartbeat on a disk stops when the disk does, and so would the worker.
if Path('/dev/shm').is_dir():
    worker_tmp_dir = '/dev/shm'

# ---- time limits, in seconds

# How long an idle connection is kept. Clients pool connections; at two seconds, the
# default, they often find theirs closed just as they send.
keepalive = 15
# Longer than any sync: a worker that is told to stop answers what it has begun.
graceful_timeout = 30
# For one request, from its first byte to the end of its body. gunicorn has no such
# limit, and without one a byte a minute holds a thread for good.
REQUEST_TIMEOUT = 30
# How long a busier worker leaves a new connection to the others.
STAND_BACK = 0.001

# ---- what is off

# A socket for `gunicornc`, in the home directory, which a hardened unit cannot write.
control_socket_disable = True


def pre_fork(server: Arbiter, worker: Worker) -> None:
    """Choose the core that a worker will keep to: the one with the fewest workers."""
    taken = [other.core for other in server.WORKERS.values()]
    worker.core = min(os.sched_getaffinity(0), key=taken.count)


def post_fork(server: Arbiter, worker: Worker) -> None:
    """Keep a worker to its core.

    Its threads run one at a time in any case (the GIL). On one core a thread that lets
    go of the GIL for a system call has it back at once; on two it wakes a thread on the
    other one, and both wait for each other.
    """
    os.sched_setaffinity(0, {worker.core})


def pre_request(worker: Worker, request: Request) -> None:
    """Let the application announce that the connection closes (``AnnouncedClose``)."""
    request.body.force_close = request.force_close


# ---- the worker

# How many connections each worker has, for the others to see; shared by the fork.
SLOTS = 256
NOT_SERVING = 2**32 - 1
loads = memoryview(mmap.mmap(-1, 4 * SLOTS)).cast('I')
loads[:] = array('I', [NOT_SERVING]) * SLOTS

STATUSES = {
    errors.LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    errors.ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
    errors.LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    errors.UnsupportedTransferCoding: HTTPStatus.NOT_IMPLEMENTED,
}
# What the application tried to send, and what the operator has configured.
OUR_FAULTS = (
    errors.InvalidResponseHeader,
    errors.InvalidResponseHeaderName,
    errors.ConfigurationProblem,
)


class PlantsWorker(ThreadWorker):  # type: ignore[misc]
    """gthread, with connections spread evenly and a time limit for each request.

    *Spreading.* All workers wait at one socket, and the first to wake takes what comes:
    a few kept connections often end up at one worker while the other idles. The usual
    remedy, a socket for each worker (``reuse_port``), spreads by a hash, which is even
    only for many connections; it no longer refuses a second server on the port; and
    what waits at the socket of a worker that stops is reset. Here a worker that has
    more connections than another stands back for a moment when a new one comes. If
    nobody takes it meanwhile, it does.

    *Time limit.* A request that is not read to its end in time sees the end of its
    input. A request that is being answered does not read, and so does not notice.

    *Errors.* A request that cannot reach the application is answered in JSON like all
    others, and the log does not repeat it: there may be a token in it. gunicorn's own
    answer is an HTML page, and no setting changes that.

    *Closing.* gunicorn waits up to two seconds for the client to close its end too, so
    that the answer gets through, and it does so where all other clients wait for it.
    Here the thread that served the client waits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slot = self.age % SLOTS
        self._standing_back = False
        self._patient = True
        self._deadlines: dict[TConn, float] = {}
        self._quitting = False
        self._next_look = 0.0

    def accept(self, listener: socket.socket) -> None:
        if self._patient and self.nr_conns > min(loads):
            self._standing_back = True
        else:
            super().accept(listener)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        loads[self._slot] = self.nr_conns if self.alive else NOT_SERVING
        stand_back, self._standing_back = self._standing_back, False
        if stand_back:
            self.set_accept_enabled(False)  # run() enables it again in its next turn
            timeout = STAND_BACK
        super().wait_for_and_dispatch_events(timeout)
        self._patient = not stand_back

    def handle(self, conn: TConn) -> Any:
        self._deadlines[conn] = time.monotonic() + REQUEST_TIMEOUT
        try:
            kept = not self._quitting and super().handle(conn)
            if not kept:
                with suppress(OSError):  # it is closed already
                    conn.sock.setblocking(True)
                    util.close_graceful(conn.sock)
            return kept
        finally:
            del self._deadlines[conn]

    def finish_request(self, conn: TConn, done: Future[Any]) -> None:
        if done.cancelled() or done.exception() or done.result():
            super().finish_request(conn, done)
        else:
            self.nr_conns -= 1  # handle() has closed it

    def handle_error(
        self, request: Request, client: socket.socket, address: Any, error: Exception
    ) -> None:
        if isinstance(error, ParseException) and not isinstance(error, OUR_FAULTS):
            status = STATUSES.get(type(error), HTTPStatus.BAD_REQUEST)
            self.log.warning('A request was refused: %s', type(error).__name__)
        else:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            self.log.exception('A request could not be served')
        message = f'{status.phrase}: the HTTP server cannot serve this request'
        body = json.dumps({'error': 100 * status, 'message': message})
        answer = (
            f'HTTP/1.1 {status} {status.phrase}\r\n'
            f'Connection: close\r\n'
            f'Content-Type: application/json\r\n'
            f'Content-Length: {len(body)}\r\n'
            f'\r\n'
            f'{body}'
        )
        with suppress(OSError):  # the client is gone
            util.write_nonblock(client, answer.encode())

    def murder_pending(self) -> None:
        super().murder_pending()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + 1
            self._shut_down([c for c, end in self._busy() if end < now], socket.SHUT_RD)

    def handle_quit(self, sig: int, frame: Any) -> None:
        # Ctrl-C reaches a worker twice, from the terminal and from the master.
        if self._quitting:
            return
        self._quitting = True
        # The process ends when its threads do, so none may wait for a client.
        self._shut_down([conn for conn, _ in self._busy()], socket.SHUT_RDWR)
        # NOTE: not gthread's own, which shuts the pool down: that takes a lock which
        # the code that this signal has interrupted may hold.
        Worker.handle_quit(self, sig, frame)

    def _busy(self) -> list[tuple[TConn, float]]:
        return list(self._deadlines.items())

    def _shut_down(self, connections: list[TConn], how: int) -> None:
        for conn in connections:
            with suppress(OSError):  # it is closed already
                conn.sock.shutdown(how)


worker_class = PlantsWorker


def child_exit(server: Arbiter, worker: Worker) -> None:
    """Forget the connections of a worker that could not do so itself."""
    loads[worker.age % SLOTS] = NOT_SERVING


# ---- start and reload


def on_starting(server: Arbiter) -> None:
    """Refuse a start that cannot work, here and with a sentence.

    Otherwise workers would die in a loop, or be killed by their heartbeat while they
    build an index that every one of them waits for.
    """
    import app
    import schemas
    from store import StoreError

    _log_with(server)
    try:
        settings = app.Settings.from_environ(os.environ)
        schemas.load()
        _open_store_once(settings.store)
    except (ValueError, StoreError) as ex:
        sys.exit(f'Error: {ex}')
    if settings.store == 'memory:' and server.cfg.workers > 1:
        sys.exit(
            f'Error: PLANTS_STORE: memory: needs one worker, not {server.cfg.workers}: '
            f'each would hold its own plants'
        )
    # A worker that starts when the file is gone must not make a new one.
    os.environ[app.STORE_EXISTS] = 'yes'
    os.environ[app.LAST_TOKENS] = str(settings.tokens or '')
    if settings.tokens is None:
        # In the environment, where workers find it; in env_orig, which a new master
        # is started with on SIGUSR2.
        token = os.environ['PLANTS_TOKENS'] = secrets.token_urlsafe()
        server.cfg.env_orig['PLANTS_TOKENS'] = token
        server.new_token = token


def when_ready(server: Arbiter) -> None:
    """Print the token that was made, once, now that the address is known."""
    import app

    token = getattr(server, 'new_token', None)
    if token is not None:
        address = str(server.LISTENERS[0]).replace('0.0.0.0', '127.0.0.1')
        if address.startswith('unix:'):
            address = 'http://HOST:PORT'
        print(app.new_token_notice(token, address), file=sys.stderr, flush=True)


def nworkers_changed(server: Arbiter, new: int, old: int | None) -> None:
    """Keep to one worker with a store in memory, also on SIGTTIN."""
    if old is not None and new > 1 and os.environ.get('PLANTS_STORE') == 'memory:':
        server.log.error('PLANTS_STORE: memory: needs one worker, not %d', new)
        server.num_workers = 1


def on_reload(server: Arbiter) -> None:
    """Open the store as a start does, before there are new workers."""
    import app
    from store import StoreError

    _log_with(server)
    try:
        settings = app.Settings.from_environ(os.environ)
        os.environ[app.LAST_TOKENS] = str(settings.tokens or '')
        _open_store_once(settings.store)
    except (ValueError, StoreError) as ex:
        server.log.error('%s', ex)


def _open_store_once(url: str) -> None:
    from store import open_store

    with open_store(url, create='always') as store:
        store.ping()


def _log_with(server: Arbiter) -> None:
    """Send the service's own log where gunicorn sends its own."""
    for name in ('plants', 'store'):
        logger = logging.getLogger(name)
        logger.handlers = server.log.error_log.handlers
        logger.setLevel(server.log.error_log.level)
        logger.propagate = False
