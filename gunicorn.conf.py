"""How gunicorn serves the plant store: `gunicorn` alone, in this directory.

Each setting is here because its default is wrong for this service. All of them give way
to the command line and to GUNICORN_CMD_ARGS. In the order of a server's life.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import math
import mmap
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from functools import lru_cache
from functools import partial
from http import HTTPStatus
from io import BytesIO
from itertools import count
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from typing import TypeVar

from greenlet import getcurrent
from greenlet import greenlet
from gunicorn import glogging
from gunicorn import util
from gunicorn.app.base import Application
from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.arbiter import Arbiter
from gunicorn.config import Config
from gunicorn.http import errors
from gunicorn.http.body import LengthReader
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

# ---- processes


def _is_in_memory() -> bool:
    return os.environ.get('PLANTS_STORE') == 'memory:'


if 'WEB_CONCURRENCY' not in os.environ:
    # More than one would each have plants of its own.
    workers = 1 if _is_in_memory() else len(os.sched_getaffinity(0))
# Connections of each worker. One that is slow or idle costs some kilobytes, no thread.
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
# limit, and without one a byte a minute holds a connection for good.
REQUEST_TIMEOUT = 30
# For the client to take an answer that is the last of its connection.
LINGER = 2
# How often a worker that stops looks whether the time of a client is up.
LOOK_AT_END = 0.1
# How long a busier worker leaves a new connection to the others.
STAND_BACK = 0.005

# ---- what is off

# It would go around what collects the answers of a turn.
sendfile = False
# A socket for `gunicornc`, in the home directory, which a hardened unit cannot write.
control_socket_disable = True


# ---- the log

# What Python documents as switches for speed: the line of code that logs, its thread
# and its process's name are found out for every record, and no line shows them.
logging._srcfile = None
logging.logThreads = False
logging.logMultiprocessing = False


class TextFormatter(logging.Formatter):
    """gunicorn's format, with the time of a second written once."""

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.stack_info:
            return super().format(record)
        began = _local_time(int(record.created))
        return f'{began} [{record.process}] [{record.levelname}] {record.getMessage()}'


class JSONFormatter(logging.Formatter):
    """One JSON object a line, for collectors.

    Every one has ``time`` (RFC 3339, UTC), ``level``, ``pid``, ``logger`` and
    ``message``, and ``exception`` if there is a traceback. A mapping that was logged
    gives its members, ``message`` among them.
    """

    def format(self, record: logging.LogRecord) -> str:
        second, fraction = divmod(record.created, 1)
        line: dict[str, Any] = {
            'time': f'{_utc_time(int(second))}.{int(1000 * fraction):03}Z',
            'level': record.levelname,
            'pid': record.process,
            'logger': record.name,
        }
        # NOTE: gunicorn logs an access with a mapping, too: of all that it knows of a
        # request, its token included.
        if isinstance(record.args, dict) and 'message' in record.args:
            line.update(record.args)
        else:
            line['message'] = record.getMessage()
        if record.exc_info:
            line['exception'] = self.formatException(record.exc_info)
        return _encode(line)


_encode = json.JSONEncoder(default=str).encode


@lru_cache(maxsize=1)
def _local_time(second: int) -> str:
    return time.strftime(glogging.Logger.datefmt, time.localtime(second))


@lru_cache(maxsize=1)
def _http_date(second: int) -> str:
    return formatdate(second, usegmt=True)


@lru_cache(maxsize=1)
def _utc_time(second: int) -> str:
    return time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(second))


class PlantsLogger(glogging.Logger):  # type: ignore[misc]
    """gunicorn's log in our formats, with the service's own lines in it.

    NOTE: for ``--statsd-host`` gunicorn needs a logger class of its own.
    """

    def setup(self, cfg: Config) -> None:
        # Called at the start, before any hook, and at each reload.
        super().setup(cfg)
        for name in ('plants', 'store'):
            logger = logging.getLogger(name)
            logger.handlers = self.error_log.handlers
            logger.setLevel(self.error_log.level)
            logger.propagate = False

    def _set_handler(
        self,
        log: logging.Logger,
        output: str,
        fmt: logging.Formatter,
        stream: Any = None,
    ) -> None:
        # NOTE: what --env sets is in the environment only later.
        if (os.environ | self.cfg.env).get('PLANTS_LOG') == 'json':
            fmt = JSONFormatter()
        elif log is self.error_log:
            fmt = TextFormatter(self.error_fmt, self.datefmt)
        super()._set_handler(log, output, fmt, stream)
        handler = self._get_gunicorn_handler(log)
        if handler is not None:
            handler.emit = partial(_emit, handler)


def _emit(handler: Any, record: logging.LogRecord) -> None:
    """Write a line with one system call, where logging's own would write and flush.

    That halves how often threads wait for each other because of the log, and no line
    of another worker comes between.
    """
    try:
        text = f'{handler.format(record)}\n'.encode(errors='backslashreplace')
        while text:
            text = text[os.write(handler.stream.fileno(), text) :]
    except Exception:
        handler.handleError(record)  # a full disk must not make a 500 of a 200


logger_class = PlantsLogger


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


def pre_fork(server: Arbiter, worker: Worker) -> None:
    """Choose the core that a worker will keep to: the one with the fewest workers."""
    taken = [other.core for other in server.WORKERS.values()]
    worker.core = min(os.sched_getaffinity(0), key=taken.count)
    numbers = {other.number for other in server.WORKERS.values()}
    worker.number = next(number for number in count() if number not in numbers)
    # Else the garbage collector of a worker would write to every object that the master
    # has made, and so unshare the memory that it is in.
    gc.freeze()


def post_fork(server: Arbiter, worker: Worker) -> None:
    """Keep a worker to its core, and let it go on with the counters of a dead one.

    Its threads run one at a time in any case (the GIL). On one core a thread that lets
    go of the GIL for a system call has it back at once; on two it wakes a thread on the
    other one, and both wait for each other.

    A stop that reaches a worker before it has its signal handlers would find those of
    the master, which only take note: the worker would go on until it is killed.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    while not server.SIG_QUEUE.empty():  # what they have noted since the fork
        if server.SIG_QUEUE.get() in STOPS:
            sys.exit()
    os.sched_setaffinity(0, {worker.core})
    # Usually 1,024 may be open, where a silent connection takes up to two.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if COUNTERS in os.environ:
        from prometheus_client import values

        # Not by process id, as is usual: files would grow in number with each reload.
        name = f'{server.pid}-{worker.number}'
        value_class = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]
        values.ValueClass = value_class


def pre_request(worker: Worker, request: Request) -> None:
    """Hand over the body as it is, if it has come with its head, as most do.

    gunicorn's own object copies it six times. Otherwise it is that object, and with it
    the application can announce that the connection closes (``AnnouncedClose``).
    """
    body = request.body
    body.force_close = request.force_close
    if isinstance(body.reader, LengthReader):
        received = request.unreader.take_buffered()
        whole, rest = received[: body.reader.length], received[body.reader.length :]
        if len(whole) == body.reader.length:
            request.body = BytesIO(whole)
            received = rest
        request.unreader.unread(received)


# ---- the worker

# The variable in which a master and its successor find the directory of the counters.
COUNTERS = '_PLANTS_COUNTERS'

# How many connections each worker has, for the others to see; shared by the fork.
SLOTS = 256
NOT_SERVING = 2**32 - 1
loads = memoryview(mmap.mmap(-1, 4 * SLOTS)).cast('I')
loads[:] = array('I', [NOT_SERVING]) * SLOTS

EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
# How many clients that are in the middle of a request are served in a turn: those that
# begin one come first, or who sends a byte at a time would hold up the others.
PIECES = 8
# How many bytes of answers are collected before they are sent. One client may have many
# requests under way, and what it does not take must not fill the memory.
MOST_COLLECTED = 65_536
# For what blocks: a sync of each batch in flight, and what is not as frequent.
MOST_THREADS = 16

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


Argument = TypeVar('Argument')
Result = TypeVar('Result')


class GreenletScheduler:
    """Lets the greenlets of a thread wait while that thread serves others.

    A greenlet is a function call that can be left and taken up again. Each connection
    is served by one, in plain sequential code, and all of them by one thread: whenever
    one would wait, for its client or for the store, it comes back to the loop of the
    worker. That is what threads are for, and what makes them dear: handing the GIL from
    one to another costs more than the whole of a request.

    It is the ``Scheduler`` of the store (``store/waiting.py``) too.

    Args:
        otherwise: The scheduler for callers that are not greenlets of ours.
    """

    def __init__(self, otherwise: Any) -> None:
        self._loop = getcurrent()
        self._thread = threading.get_ident()
        self._otherwise = otherwise
        self._ready = deque[greenlet]()
        self._later = deque[Callable[[], object]]()
        self._calls = SimpleQueue[Call]()
        self._called = 0
        self._threads = 0
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken_up = False

    def start(self, function: Callable[..., object], *args: object) -> None:
        """Call a function in a greenlet, until it waits or ends."""
        greenlet(function, self._loop).switch(*args)

    def pause(self) -> None:
        """Leave the current greenlet until somebody resumes it."""
        self._loop.switch()

    def resume(self, waiting: greenlet) -> None:
        """Take a greenlet up again in the next turn of the loop; from any thread."""
        self._ready.append(waiting)
        if not self._woken_up and threading.get_ident() != self._thread:
            self._woken_up = True
            os.eventfd_write(self.wakeup_fd, 1)

    def on_wakeup(self) -> None:
        """Be ready for the next wakeup; who was resumed goes on in the next turn."""
        # NOTE: only when it is seen to be readable. Between the flag and the write of
        # the other thread there may be a whole turn, and what is written after the flag
        # is gone would stay readable, with nobody to read it.
        os.eventfd_read(self.wakeup_fd)
        self._woken_up = False

    def turn(self) -> bool:
        """Let every greenlet go on that can; return whether some can again.

        Those are for the next turn: one that never waits does not keep out the others.
        """
        while self._later:
            self._later.popleft()()
        for _ in range(len(self._ready)):
            self._ready.popleft().switch()
        return bool(self._ready or self._later)

    def give_way(self) -> bool:
        if getcurrent().parent is None:
            more: bool = self._otherwise.give_way()
            return more
        self.resume(getcurrent())
        self.pause()
        return True

    def waiter(self) -> Any:
        if getcurrent().parent is None:
            return self._otherwise.waiter()
        return GreenletWaiter(self)

    def call(self, function: Callable[[], Result]) -> Result:
        current = getcurrent()
        if current.parent is None:
            found: Result = self._otherwise.call(function)
            return found
        call = Call(function, current)
        self._called += 1
        try:
            if self._called > self._threads < MOST_THREADS:
                self._start_thread()
            self._calls.put(call)
            while not call.done:
                self.pause()
        finally:
            self._called -= 1
        if call.error is not None:
            raise call.error
        result: Result = call.result
        return result

    def later(self, function: Callable[..., object], *args: object) -> None:
        # All of a turn are called in a row: what they have in common is found in the
        # caches of the core from the second one on.
        if getcurrent().parent is None:
            self._otherwise.later(function, *args)
        else:
            self._later.append(partial(function, *args))

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._run_calls, daemon=True).start()
        except RuntimeError:  # the system has no room for one more
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _run_calls(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call.result = call.function()
            except BaseException as ex:
                call.error = ex
            call.done = True
            self.resume(call.caller)


class Call:
    """A call that a thread makes while its caller pauses."""

    result: Any = None
    error: BaseException | None = None
    done = False

    def __init__(self, function: Callable[[], Any], caller: greenlet) -> None:
        self.function = function
        self.caller = caller


class GreenletWaiter:
    """A greenlet that waits for another, which may run in a thread."""

    def __init__(self, scheduler: GreenletScheduler) -> None:
        self._scheduler = scheduler
        self._greenlet = getcurrent()
        self._woken = False

    def wait(self) -> None:
        while not self._woken:
            self._scheduler.pause()

    def wake(self) -> None:
        self._woken = True
        self._scheduler.resume(self._greenlet)


class ClientSocket:
    """A client's socket, as blocking code sees it; only its greenlet blocks.

    What is sent is collected, and goes out when the greenlet waits for the client.

    Attributes:
        deadline: When to give up, in seconds on the monotonic clock.
        is_idle: Whether it has no request under way.
    """

    def __init__(self, scheduler: GreenletScheduler, sock: socket.socket) -> None:
        self._scheduler = scheduler
        self._sock = sock
        self._out: list[bytes] = []
        self._collected = 0
        self._latest = math.inf
        self._is_sending = False
        self._is_readable = True
        self._has_ended = False
        self._greenlet: greenlet | None = None  # that waits for an event
        self.fileno = sock.fileno
        self.end = sock.close
        sock.setblocking(False)

    def setblocking(self, flag: bool) -> None:
        """It always is, for its greenlet."""

    def expect_request(self, seconds: float) -> None:
        """Give the client time to begin a request, once it has what was sent."""
        self.is_idle = True
        self._idle_time = seconds
        self.deadline = min(time.monotonic() + seconds, self._latest)

    def limit_idleness(self, deadline: float) -> None:
        """Give the client no more time than until then to begin its next request."""
        self._latest = deadline
        if self.is_idle:
            self.deadline = min(self.deadline, deadline)

    def recv(self, size: int) -> bytes:
        if self._out:
            self.flush()
            if self.is_idle:
                self.expect_request(self._idle_time)
        if not self._is_readable:
            self._wait()
        data = self._retry(self._sock.recv, size)
        # NOTE: after less than was asked for there is nothing more, and the next event
        # tells when there is (epoll(7)). The end was told already.
        self._is_readable = len(data) == size or self._has_ended
        if self.is_idle:
            self.is_idle = False
            self.deadline = time.monotonic() + REQUEST_TIMEOUT
        return data

    def sendall(self, data: bytes) -> None:
        self._out.append(data)
        self._collected += len(data)
        if self._collected > MOST_COLLECTED:
            self.flush()

    send = sendall

    def shutdown(self, how: int) -> None:
        """Leave it to the worker how a connection ends; gunicorn gives up then."""
        raise OSError(errno.ENOTCONN, 'the worker ends it')

    def close(self) -> None:
        """See ``shutdown``."""

    def flush(self) -> None:
        """Send what was collected; who takes it slowly has time for each piece.

        The answers of a turn go out one after another, in the next one: each wakes a
        client, which may take the core from whoever is served.
        """
        self._scheduler.give_way()
        out, self._out = self._out, []
        if self._collected <= MOST_COLLECTED:
            out = [b''.join(out)]  # else without a copy: what is large is shared
        self._collected = 0
        self._is_sending = True
        for data in out:
            rest = memoryview(data)
            while rest:
                rest = rest[self._retry(self._sock.send, rest) :]
                self.deadline = time.monotonic() + REQUEST_TIMEOUT
        self._is_sending = False

    def linger(self) -> None:
        """Let the client take the last answer before the connection is closed.

        A connection that is closed with something unread is reset, and a reset takes
        the answer with it (RFC 9112, section 9.6).
        """
        self.flush()
        self._sock.shutdown(socket.SHUT_WR)
        self.is_idle = False
        self.deadline = time.monotonic() + LINGER
        unread = 0
        while unread < 65_536 and (data := self.recv(65_536)):
            unread += len(data)

    def give_up(self) -> None:
        """Let its greenlet see the end of the connection, in its direction."""
        self.deadline = math.inf
        how = socket.SHUT_RDWR if self._is_sending else socket.SHUT_RD
        with suppress(OSError):  # it has ended already
            self._sock.shutdown(how)

    def on_event(self, events: int) -> None:
        """Let its greenlet try again."""
        self._has_ended |= bool(events & ENDS)
        self._is_readable |= bool(events & ~select.EPOLLOUT)
        if self._greenlet is not None:
            self._greenlet.switch()

    def _retry(self, call: Callable[[Argument], Result], argument: Argument) -> Result:
        while True:
            try:
                return call(argument)
            except BlockingIOError:
                self._wait()

    def _wait(self) -> None:
        self._greenlet = getcurrent()
        self._scheduler.pause()
        self._greenlet = None


class PlantsWorker(ThreadWorker):  # type: ignore[misc]
    """gthread, with greenlets in the place of its threads.

    *Spreading.* All workers wait at one socket, and the first to wake takes what comes:
    a few kept connections often end up at one worker while the other idles. The usual
    remedy, a socket for each worker (``reuse_port``), spreads by a hash, which is even
    only for many connections; it no longer refuses a second server on the port; and
    what waits at the socket of a worker that stops is reset. Here a worker that has
    more connections than another stands back for a moment when a new one comes. If
    nobody takes it meanwhile, it does.

    *Time limits.* A client that does not send in time sees its connection end, and a
    request that is not read to its end then ends early. A request that is being
    answered does not read, and so does not notice.

    *Errors.* A request that cannot reach the application is answered in JSON like all
    others, and the log does not repeat it: there may be a token in it. gunicorn's own
    answer is an HTML page, and no setting changes that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slot = self.age % SLOTS
        self._standing_back = False
        self._patient = True
        self._clients: dict[int, ClientSocket] = {}
        self._pieces: dict[ClientSocket, int] = {}  # with what has happened to it
        self._busy = False
        self._quitting = False
        self._next_look = 0.0

    def run(self) -> None:
        from store import waiting

        # What gunicorn works out anew for each request: the time as text, and each of
        # some twenty settings by a search and two calls.
        util.http_date = lambda: _http_date(int(time.time()))
        for name, setting in self.cfg.settings.items():
            self.cfg.__dict__[name] = setting.get()
        # In seconds; a thread that comes back from a sync waits no longer for the GIL.
        sys.setswitchinterval(0.0002)
        self._scheduler = GreenletScheduler(waiting.current)
        waiting.current = self._scheduler
        self._epoll = select.epoll()
        self._epoll.register(self.poller.fileno(), select.EPOLLIN)
        self._epoll.register(self._scheduler.wakeup_fd, select.EPOLLIN)
        super().run()

    def accept(self, listener: socket.socket) -> None:
        # Of few connections each one counts; many may come in a crowd.
        if self._patient and self.nr_conns > min(loads) + self.nr_conns // 16:
            self._standing_back = True
            return
        sock = None
        try:
            sock, address = listener.accept()
            # Edge-triggered, once and for all: whoever waits has tried before.
            self._epoll.register(sock.fileno(), EDGES)
        except OSError as ex:
            if ex.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                self._standing_back = True  # no room: others have to close first
            if sock is not None:
                sock.close()
            return
        client = ClientSocket(self._scheduler, sock)
        self.nr_conns += 1
        self._clients[client.fileno()] = client
        self._scheduler.start(self._serve, client, address, listener.getsockname())

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        if self._quitting:
            self.cfg.worker_int(self)
            sys.exit()
        loads[self._slot] = self.nr_conns if self.alive else NOT_SERVING
        stand_back, self._standing_back = self._standing_back, False
        if stand_back:
            self.set_accept_enabled(False)  # run() enables it again in its next turn
            timeout = STAND_BACK
        if not self.alive:
            timeout = min(timeout, LOOK_AT_END)
        if self._busy:
            timeout = 0
        for fd, events in self._epoll.poll(timeout):
            client = self._clients.get(fd)
            if client is not None and client.is_idle:
                client.on_event(events)
            elif client is not None:
                self._pieces[client] = self._pieces.get(client, 0) | events
            elif fd == self._scheduler.wakeup_fd:
                self._scheduler.on_wakeup()
            else:
                super().wait_for_and_dispatch_events(0)
        for client in list(islice(self._pieces, PIECES)):
            client.on_event(self._pieces.pop(client))
        self._busy = self._scheduler.turn() or bool(self._pieces)
        self._patient = not stand_back

    def _serve(self, client: ClientSocket, address: Any, server: Any) -> None:
        """Serve a connection from its beginning to its end."""
        conn = TConn(self.cfg, client, address, server)
        conn.data_ready = True  # whoever reads can wait
        try:
            client.expect_request(REQUEST_TIMEOUT)
            while self.handle(conn):
                client.expect_request(self.cfg.keepalive if self.alive else LINGER)
            client.linger()
        except OSError:
            pass  # the client is gone
        except Exception:
            # Whatever it is, it must not reach the loop, and end all the others.
            self.log.exception('A connection was lost')
        finally:
            del self._clients[client.fileno()]
            client.end()
            self.nr_conns -= 1

    def handle_error(
        self, request: Request, client: ClientSocket, address: Any, error: Exception
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
        client.sendall(answer.encode())

    def murder_pending(self) -> None:
        now = time.monotonic()
        if now >= self._next_look or not self.alive:
            self._next_look = now + 1
            for client in list(self._clients.values()):
                if client.deadline < now:
                    client.give_up()

    def _cap_keepalive(self, deadline: float) -> None:
        for client in self._clients.values():
            client.limit_idleness(deadline)

    def handle_quit(self, sig: int, frame: Any) -> None:
        # NOTE: gunicorn's own exits here, inside whatever the signal has interrupted,
        # which may hold a lock that the exit needs.
        self._quitting = True
        self.handle_exit(sig, frame)


worker_class = PlantsWorker


def child_exit(server: Arbiter, worker: Worker) -> None:
    """Forget the connections of a worker that could not do so itself."""
    loads[worker.age % SLOTS] = NOT_SERVING


# ---- check, start and reload


def run(application: WSGIApplication) -> None:
    """Serve, or say with ``--check-config`` whether that would work.

    gunicorn's own check loads the application and calls no hook of ours: it would make
    a token, and not see most of what ``on_starting`` refuses.
    """
    cfg = application.cfg
    if not cfg.check_config and not cfg.print_config:
        Application.run(application)
        return
    if cfg.print_config:
        print(cfg)
    os.environ.update(cfg.env)
    sys.path[:0] = map(os.path.abspath, filter(None, (cfg.pythonpath or '').split(',')))
    from store import StoreError
    from store import open_store

    try:
        settings = _settings(cfg)
        with open_store(settings.store, create='never') as store:
            store.check_opening()
    except (ValueError, StoreError) as ex:
        sys.exit(f'Error: {ex}')
    _print(*_summary('the plant store would start', cfg, settings), file=sys.stdout)


WSGIApplication.run = run


def on_starting(server: Arbiter) -> None:
    """Refuse a start that cannot work, here and with a sentence.

    Otherwise workers would die in a loop, or be killed by their heartbeat while they
    build an index that every one of them waits for.
    """
    from store import StoreError

    try:
        settings = _settings(server.cfg)
        _open_store_once(settings.store)
    except (ValueError, StoreError) as ex:
        server.log.critical('%s', ex)
        if server.pidfile is not None:
            server.pidfile.unlink()
        # Who keeps the log in a file may look at the terminal first.
        sys.exit(1 if server.cfg.errorlog == '-' else f'Error: {ex}')
    server.handle_hup = partial(handle_hup, server)
    if settings.tokens is None:
        # In the environment, where workers find it; in env_orig, which a new master
        # is started with on SIGUSR2.
        token = os.environ['PLANTS_TOKENS'] = secrets.token_urlsafe()
        server.cfg.env_orig['PLANTS_TOKENS'] = token
        server.new_token = token


def when_ready(server: Arbiter) -> None:
    """Say once what is served, and where, now that the address is known.

    A token that was made is printed, not logged.
    """
    from web.settings import Settings
    from web.tokens import new_token_notice

    addresses = [str(listener) for listener in server.LISTENERS]
    settings = Settings.from_environ(os.environ)
    what, members = _summary(
        'the plant store is ready', server.cfg, settings, address=', '.join(addresses)
    )
    logging.getLogger('plants').info(what, members)
    if settings.metrics:
        _share_counters(server)
    token = getattr(server, 'new_token', None)
    if token is not None:
        address = addresses[0].replace('0.0.0.0', '127.0.0.1')
        if address.startswith('unix:'):
            address = 'http://HOST:PORT'
        _print(new_token_notice(token, address))


def pre_exec(server: Arbiter) -> None:
    """Upgrade (SIGUSR2) with the very command that started this server.

    gunicorn makes it up from ``sys.argv``, and ``python -m gunicorn`` becomes a path
    inside its package: there ``import http`` finds gunicorn's own, and nothing starts.
    """
    server.START_CTX['args'] = [sys.executable, *sys.orig_argv[1:]]


def on_exit(server: Arbiter) -> None:
    """Remove the counters, unless another master of an upgrade goes on with them."""
    if COUNTERS in os.environ and server.reexec_pid == server.master_pid == 0:
        shutil.rmtree(os.environ[COUNTERS], ignore_errors=True)


def nworkers_changed(server: Arbiter, new: int, old: int | None) -> None:
    """Keep to one worker with a store in memory, also on SIGTTIN."""
    if old is not None and new > 1 and _is_in_memory():
        server.log.error('PLANTS_STORE: memory: needs one worker, not %d', new)
        server.num_workers = 1


def handle_hup(server: Arbiter) -> None:
    """Reload, unless a start would not work now.

    gunicorn ends a server that works when its new workers do not start. So everything
    that a reload takes up (code, schemas, configuration) is tried in another process
    first. Then the modules that this one has imported, which new workers share, give
    way to those that are in the files; they, not the old ones, open the store.
    """
    check = subprocess.run(
        [sys.executable, *sys.orig_argv[1:], '--check-config'],
        cwd=server.START_CTX['cwd'],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    ours = [
        x
        for x in sys.modules
        if x.partition('.')[0] in ('app', 'schemas', 'store', 'web')
    ]
    old = {name: sys.modules.pop(name) for name in ours}
    try:
        if check.returncode:
            raise RuntimeError(check.stderr.strip())
        from web.settings import Settings

        settings = Settings.from_environ(os.environ)
        _open_store_once(settings.store)
    except Exception as ex:
        sys.modules.update(old)
        server.log.error('Not reloaded, and served as before: %s', ex)
    else:
        Arbiter.handle_hup(server)


def _settings(cfg: Config) -> Any:
    """Return the settings, if workers can be started with them.

    Raises:
        ValueError: They cannot; the message is a sentence.
    """
    import schemas
    from web.settings import Settings

    settings = Settings.from_environ(os.environ)
    schemas.load()
    if _is_in_memory() and cfg.workers > 1:
        raise ValueError(
            f'PLANTS_STORE: memory: needs one worker, not {cfg.workers}: '
            f'each would hold its own plants'
        )
    # Where gunicorn would go on without a word.
    if cfg.is_ssl and cfg.settings['worker_class'].get() is PlantsWorker:
        raise ValueError('certfile, keyfile: TLS is for a proxy in front')
    if cfg.statsd_host and cfg.settings['logger_class'].get() is PlantsLogger:
        raise ValueError(
            'statsd_host: it needs --logger-class gunicorn.instrument.statsd.Statsd'
        )
    return settings


def _open_store_once(url: str) -> None:
    from store import open_store

    with open_store(url, create='always') as store:
        store.ping()


def _share_counters(server: Arbiter) -> None:
    """Give the workers a directory for their counters, in memory and for us alone.

    Both masters of an upgrade use one, so that each of their workers knows all.
    """
    directory = os.environ.get(COUNTERS, '')
    if not os.path.isdir(directory):
        where = server.cfg.worker_tmp_dir
        directory = tempfile.mkdtemp(prefix='plants-counters-', dir=where)
        os.chown(directory, server.cfg.uid, server.cfg.gid)
    os.environ[COUNTERS] = server.cfg.env_orig[COUNTERS] = directory
    os.environ['PROMETHEUS_MULTIPROC_DIR'] = directory


def _summary(
    message: str, cfg: Config, settings: Any, **members: object
) -> tuple[str, dict[str, object]]:
    """Return what to tell of a server: a format for people, and the members."""
    from store import masked

    members |= {
        'store': masked(settings.store),
        'tokens': 1 if settings.tokens is None else len(settings.tokens),
        'workers': cfg.workers,
    }
    lines = [f'    {name:9}%({name})s' for name in members]
    return '\n'.join(['%(message)s', *lines]), {'message': message, **members}


def _print(
    message: str, members: dict[str, object] | None = None, file: Any = None
) -> None:
    """Print what is not for the log, as a line of it if it has JSON lines."""
    record = logging.makeLogRecord(
        {'name': 'plants', 'levelname': 'INFO', 'msg': message, 'args': members}
    )
    json_lines = os.environ.get('PLANTS_LOG') == 'json'
    line = JSONFormatter().format(record) if json_lines else record.getMessage()
    print(line, file=file or sys.stderr, flush=True)
