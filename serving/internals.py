"""Every use of an undocumented part of gunicorn, checked against ``CHECKED_VERSION``.

A test fails when another version is installed. Then check that each part still works
as it did, and whether gunicorn has a setting or a hook for it by now.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO, RawIOBase
from itertools import count
from typing import Any

from gunicorn import util
from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.arbiter import Arbiter
from gunicorn.config import Config
from gunicorn.http import errors
from gunicorn.http.body import Body, LengthReader
from gunicorn.http.errors import LimitRequestHeaders
from gunicorn.http.message import Request, _ip_in_allow_list
from gunicorn.http.unreader import SocketUnreader
from gunicorn.http.wsgi import Response, WSGIErrorsWrapper, create
from gunicorn.sock import ssl_context
from gunicorn.workers.base import Worker

__all__ = ['CHECKED_VERSION', 'LimitRequestHeaders', 'ssl_context']

CHECKED_VERSION = '27.0.1'

# What gunicorn reads away after an answer is shorter than this, in bytes.
LONG_REST = 65_536
# How many heads are known, and the longest of them in bytes.
KNOWN_HEADS = 256
MAX_KNOWN_HEAD = 4096
# A line that gunicorn would neither refuse nor interpret.
REQUEST_ID = re.compile(rb'\r\n(?i:X-Request-Id): ?([!-~]{1,128})(?=\r\n)')

STATUSES = {
    errors.LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    errors.ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
    errors.LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
}
# Errors in our own response or configuration.
OUR_ERRORS = (
    errors.InvalidResponseHeader,
    errors.InvalidResponseHeaderName,
    errors.ConfigurationProblem,
)


def status_of(error: Exception) -> HTTPStatus:
    """Return the status that answers an exception raised while a request was read."""
    if isinstance(error, errors.ParseException) and not isinstance(error, OUR_ERRORS):
        return STATUSES.get(type(error), HTTPStatus.BAD_REQUEST)
    return HTTPStatus.INTERNAL_SERVER_ERROR


# ---- requests


class StrictRequest(Request):  # type: ignore[misc]
    """gunicorn's request, stricter where a proxy might read a head otherwise.

    gunicorn has no hook between the head and the body, and asks ``should_close`` when
    it writes the head of the answer.

    Attributes:
        body: A file with the body.
        content_length: Its length in bytes; ``None`` if it comes in chunks.
        environ: What the head says in terms of WSGI, once it is known; requests with
            the same head share it.
        request_id: The header X-Request-Id, which they do not share; or empty.
    """

    body: Any
    content_length: int | None
    environ: dict[str, Any]
    request_id = ''

    def _peer_is_trusted_proxy(self) -> bool:
        # The answer for an address never changes, and takes 5 us to find.
        address = self.peer_addr
        if not isinstance(address, tuple):
            return bool(super()._peer_is_trusted_proxy())
        return _is_trusted_proxy(self.cfg, address[0])

    def set_body_reader(self) -> None:
        hosts = 0
        options: set[str] = set()
        for name, value in self.headers:
            if name == 'HOST':
                hosts += 1
            elif name == 'CONNECTION':
                options.update(map(str.strip, value.lower().split(',')))
            elif name == 'TRANSFER-ENCODING' and value.lower() != 'chunked':
                raise errors.InvalidHeader(name)  # RFC 9112, section 6.1
        if not hosts and self.version >= (1, 1):
            raise errors.InvalidHeader('HOST')  # RFC 9112, section 3.2
        self.content_length = None
        self.environ = {}
        super().set_body_reader()
        self.must_close = 'close' in options or super().should_close()
        reader = self.body.reader
        if isinstance(reader, LengthReader):
            self.content_length = reader.length
            self.take_body(self.unreader.take_buffered())

    def take_body(self, received: bytes) -> None:
        """Take the body from the bytes received after the head, if it is complete.

        gunicorn's own reader copies it six times, which takes 26 us.
        """
        length = self.content_length or 0
        if len(received) >= length:
            self.body = BytesIO(received[:length])
            self.unreader.unread(received[length:])
        else:
            self.body = Body(LengthReader(self.unreader, length))
            self.unreader.unread(received)

    def should_close(self) -> bool:
        return self.must_close or self.unreader.sock.has_ended or self._leaves_body()

    def _leaves_body(self) -> bool:
        """Whether so much of the body is unread that the connection must close.

        The client must be told in this answer, or its next request fails.
        """
        if isinstance(self.body, BytesIO):
            return False
        reader = self.body.reader
        if isinstance(reader, LengthReader):
            return bool(reader.length >= LONG_REST)
        return reader.parser is not None


class Exchanges:
    """The requests of all connections of a worker, and their WSGI environments.

    A client sends the same head with each request, byte for byte, unless the length of
    the body changes. So the latest heads are kept with the result of parsing them.
    Side by side (two workers, 16 and 64 connections) an add takes 269 and 247 us of
    CPU with this, 367 and 364 without, and 32 and 33 % more are made. A request id
    differs each time, and proxies add one, so heads are known by their other lines.

    Args:
        cfg: gunicorn's settings.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._known: dict[tuple[bytes, Any, Any], dict[str, Any]] = {}
        self._keeps = (
            # An operator's hook may change each request.
            cfg.pre_request is cfg.settings['pre_request'].default
            # The line with a request id may go on, or be too long.
            and not cfg.permit_obsolete_folding
            and not 0 < cfg.limit_request_field_size < 256
        )
        self._error_log = ErrorLog(cfg)

    def requests(self, client: Any, address: Any, listener: Any) -> Iterator[Any]:
        """Yield the requests of a connection, one after another.

        Args:
            client: Has ``recv``.
            address: Of the client.
            listener: The address that the client has connected to.

        Raises:
            OSError: The connection ended in the middle of a head.
            Exception: What ``status_of`` knows: the request is refused.
        """
        unreader = SocketUnreader(client)
        # gunicorn trusts the forwarding headers of some hosts only.
        host = address[0] if isinstance(address, tuple) else address
        proxied = None
        for number in count(1):
            received = unreader.read()
            if not received:
                return
            end = received.find(b'\r\n\r\n') + 4
            head, request_id = received[:end], ''
            if line := REQUEST_ID.search(head):
                head = head[: line.start()] + head[line.end() :]
                request_id = line[1].decode()
            key = head, host, listener
            known = None if proxied else self._known.get(key)
            if known is None:
                unreader.unread(received)
                request = StrictRequest(self._cfg, unreader, address, number)
                request.request_id = request_id
                # What a proxy says of its client holds for the whole connection.
                proxied = request.proxy_protocol_info or proxied
                request.proxy_protocol_info = proxied
                if 4 <= end <= MAX_KNOWN_HEAD:
                    self._keep(key, request)
            else:
                request = StrictRequest.__new__(StrictRequest)
                request.__dict__.update(
                    known,
                    unreader=unreader,
                    peer_addr=address,
                    remote_addr=address,
                    req_number=number,
                    request_id=request_id,
                )
                if request_id:
                    request.headers = [*request.headers, ('X-REQUEST-ID', request_id)]
                request.take_body(received[end:])
            yield request
            if request.should_close() or getattr(request.body, 'failed', False):
                return

    def _keep(self, key: tuple[bytes, Any, Any], request: StrictRequest) -> None:
        names = [name.replace('_', '-') for name, _ in request.headers]
        if (
            not self._keeps
            # The head alone does not determine the request.
            or request.content_length is None
            or request.proxy_protocol_info
            or request._expected_100_continue
            # With another request id it might be refused, or there are two.
            or len(names) >= request.limit_request_fields
            or names.count('X-REQUEST-ID') != bool(request.request_id)
            # The line that was cut out may have been the first one.
            or key[0].startswith(b'\r')
        ):
            return
        if len(self._known) == KNOWN_HEADS:
            self._known.clear()
        headers = [pair for pair in request.headers if pair[0] != 'X-REQUEST-ID']
        known = vars(request) | {'headers': headers, 'body': None, 'unreader': None}
        self._known[key] = known

    def respond(
        self, request: StrictRequest, listener: Any
    ) -> tuple[Response, dict[str, Any]]:
        """Return the response to a request, empty yet, and the WSGI environment."""
        client, address = request.unreader.sock, request.peer_addr
        if request.environ:
            response = Response(request, client, self._cfg)
            environ = request.environ.copy()
            environ['wsgi.input'] = request.body
            environ['gunicorn.socket'] = client
            if request.request_id:
                environ['HTTP_X_REQUEST_ID'] = request.request_id
            if isinstance(address, tuple):
                environ['REMOTE_PORT'] = str(address[1])
        else:
            response, environ = create(request, client, address, listener, self._cfg)
            del environ['wsgi.early_hints']  # they would wait in the response buffer
            environ['wsgi.errors'] = self._error_log
            environ['wsgi.multithread'] = True
            request.environ.update(environ)
            request.environ['wsgi.input'] = request.environ['gunicorn.socket'] = None
            request.environ.pop('HTTP_X_REQUEST_ID', None)
        return response, environ


class ErrorLog(RawIOBase):
    """``wsgi.errors``: makes gunicorn's own object when something is written to it.

    Args:
        cfg: gunicorn's settings.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg

    def write(self, data: Any) -> None:
        WSGIErrorsWrapper(self._cfg).write(data)


def discard_body(request: Request) -> None:
    """Read the rest of a body, which is short.

    Raises:
        Exception: What ``status_of`` knows.
    """
    while request.body.read(LONG_REST):
        pass


def has_more(request: Request) -> bool:
    """Whether bytes of the next request have been received."""
    return bool(request.unreader.buf.getbuffer().nbytes)


@lru_cache(maxsize=1024)
def _is_trusted_proxy(cfg: Config, host: str) -> bool:
    networks = cfg.forwarded_allow_networks()
    return bool(_ip_in_allow_list(host, cfg.forwarded_allow_ips, networks))


def remember_settings(cfg: Config) -> None:
    """Look up gunicorn's settings once, which saves 15 us for each new head.

    gunicorn finds each of about twenty settings by a search and two calls, and formats
    the time for each answer.
    """
    for name, setting in cfg.settings.items():
        cfg.__dict__[name] = setting.get()
    util.http_date = http_date


def http_date() -> str:
    """Return the time for the header ``Date`` (RFC 9110, section 5.6.7)."""
    return _http_date(int(time.time()))


@lru_cache(maxsize=1)
def _http_date(second: int) -> str:
    return formatdate(second, usegmt=True)


# ---- the master


def run_with(before: Callable[[WSGIApplication], None]) -> None:
    """Have a function called before gunicorn runs, also for ``--check-config``.

    gunicorn's own check only imports the application and calls no hook, and what is
    refused after ``--daemon`` took effect has no terminal to be told on.
    """
    run = WSGIApplication.run
    if run.__module__ == __name__:
        return  # a reload reads the configuration again

    def run_after(application: WSGIApplication) -> None:
        before(application)
        run(application)

    WSGIApplication.run = run_after


def application_name(application: WSGIApplication) -> str:
    """Return what gunicorn is to serve, ``MODULE:NAME``."""
    return str(application.app_uri)


def preload(application: WSGIApplication, callable: Any) -> None:
    """Have all workers that are forked from now on serve an application."""
    application.callable = callable


def start_command(server: Arbiter) -> tuple[list[str], str]:
    """Return the arguments of the command that started a master, and where it was."""
    return sys.argv[1:], server.START_CTX['cwd']


def use_same_command(server: Arbiter) -> None:
    """Upgrade (SIGUSR2) with the very command that started this server.

    gunicorn makes it up from ``sys.argv``, and ``python -m gunicorn`` becomes a path
    inside its package: there ``import http`` finds gunicorn's own, and nothing starts.
    """
    server.START_CTX['args'] = [sys.executable, *sys.orig_argv[1:]]


def remove_pidfile(server: Arbiter) -> None:
    """Remove the file with the process id: gunicorn makes it before it starts."""
    if server.pidfile is not None:
        server.pidfile.unlink()


def bound_addresses(server: Arbiter) -> list[str]:
    """Return where a master listens, with ports that the system has chosen."""
    return [str(listener) for listener in server.LISTENERS]


def hand_over(server: Arbiter, *names: str) -> None:
    """Give variables to the master of an upgrade, which has those of before the start.

    Args:
        server: The master.
        names: Those that are set.
    """
    for name in os.environ.keys() & names:
        server.cfg.env_orig[name] = os.environ[name]


def siblings(server: Arbiter) -> list[Worker]:
    """Return the workers that are running."""
    return list(server.WORKERS.values())


def is_upgrading(server: Arbiter) -> bool:
    """Whether another master of an upgrade runs beside this one."""
    return not server.reexec_pid == server.master_pid == 0


def listening_sockets(worker: Worker) -> list[tuple[int, int]]:
    """Take over the sockets of a worker; return their families and descriptors."""
    return [(listener.FAMILY, listener.sock.detach()) for listener in worker.sockets]


def signal_pipe(worker: Worker) -> int:
    """Return a descriptor with something to read when a worker has got a signal."""
    number: int = worker.PIPE[0]
    return number


def reset_signals(server: Arbiter) -> None:
    """Let a worker that has just been forked be stopped.

    A stop that reaches a worker before it has its own signal handlers would find those
    of the master, which only queue it: the worker would go on until it is killed.
    """
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    for number in stops:
        signal.signal(number, signal.SIG_DFL)
    while not server.SIG_QUEUE.empty():  # what was queued since the fork
        if server.SIG_QUEUE.get() in stops:
            sys.exit()
