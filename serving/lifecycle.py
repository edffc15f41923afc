"""The life of a server: check, start, reload, upgrade, end.

The master builds the application once, before it forks, and every worker serves that
object. So does a worker that starts later, when files are half edited or gone. A reload
builds a new application. Workers inherit what they need (schemas, tokens, code, which
file the store is) by the fork.

The master opens the store once before it makes workers, in the foreground. So a damaged
file, a bad URL or an index to build is dealt with there, with a sentence or a progress
line, and not by workers that die in a loop. Afterwards the master never waits for a
store, a lock or another process: workers open the store, and a reload is first tried in
a process of its own.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.arbiter import Arbiter
from gunicorn.config import Config
from gunicorn.workers.base import Worker

import app
from serving import counters, internals
from serving.log import PlantsLogger
from serving.scheduler import GeventScheduler
from serving.worker import PlantsWorker
from store import PlantStore, StoreError, masked, open_store
from store.scheduler import THREADS
from web.metrics import Processes
from web.settings import Settings, is_in_memory
from web.tokens import new_token_notice

log = logging.getLogger('plants')

# How long a rehearsal of a reload may take, in seconds.
REHEARSAL_TIMEOUT = 300
REHEARSAL_PASSED = 'a start would work'
REHEARSAL_CODE = (
    'import signal, sys; directory, seconds, bound = sys.argv[1:4]; del sys.argv[1:4]; '
    'signal.alarm(int(seconds)); '  # ends it if the master has gone
    'sys.path.insert(0, directory); '
    'from serving import lifecycle; lifecycle.rehearse(bound.split())'
)


def default_workers(environ: Mapping[str, str]) -> int:
    """Return how many workers to run: one a core, or one for a store in memory."""
    return 1 if is_in_memory(environ) else len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Served:
    """What every worker serves until the next reload.

    Attributes:
        settings: The settings that the application was built with.
        store: The store of the application; only workers open it.
        application: The WSGI application.
    """

    settings: Settings
    store: PlantStore
    application: Any


# Workers inherit both from the master.
_served: Served | None = None
_made_token: str | None = None


# ---- before the server runs


def before_run(application: WSGIApplication) -> None:
    """Answer ``--check-config``, and refuse to make a token that nobody would see.

    It runs before gunicorn loads the application (preload_app) or leaves the terminal.
    """
    cfg = application.cfg
    makes_token_unseen = cfg.daemon or cfg.preload_app
    is_check = cfg.check_config or cfg.print_config
    if not _is_ours(application) or not (is_check or makes_token_unseen):
        return
    try:
        settings = _settings(cfg, os.environ | cfg.env)
        if is_check:
            _check(cfg, settings)
        if settings.tokens is None:
            raise ValueError(
                'daemon, preload_app: nobody would see the token that is made when '
                'none is configured: set PLANTS_TOKENS or PLANTS_TOKENS_FILE'
            )
    except (ValueError, StoreError) as ex:
        sys.exit(f'Error: {ex}')


def _check(cfg: Config, settings: Settings) -> NoReturn:
    """Say whether a start would work; change nothing."""
    if cfg.print_config:
        print(cfg)
    served = _build(settings, cfg, metrics=False)
    served.store.check_opening()
    members = _summary(cfg, settings)
    print(_template(members) % {'message': 'the plant store would start', **members})
    sys.exit()


def rehearse(bound: Sequence[str]) -> None:
    """Do what a start with the arguments of this process would do, but do not serve.

    That includes to create or recover the store.

    Args:
        bound: The addresses at which the server listens already.
    """
    application = WSGIApplication('%(prog)s [OPTIONS] [APP_MODULE]')
    try:
        _check_addresses(application.cfg, bound)
        settings = _settings(application.cfg, os.environ | application.cfg.env)
        _build(settings, application.cfg, metrics=False)
        _open_store_once(settings, application.cfg)
    except (ValueError, StoreError, OSError) as ex:
        sys.exit(str(ex))
    print(REHEARSAL_PASSED)


def _is_ours(application: WSGIApplication) -> bool:
    return internals.application_name(application) == 'app:app'


def _settings(cfg: Config, environ: Mapping[str, str]) -> Settings:
    """Return the settings, if workers can be started with them.

    Raises:
        ValueError: They cannot; the message is a sentence.
    """
    settings = Settings.from_environ(environ)
    if is_in_memory(environ) and cfg.workers > 1:
        raise ValueError(
            f'PLANTS_STORE: memory: needs one worker, not {cfg.workers}: '
            f'each would hold its own plants'
        )
    # gunicorn would ignore the setting without a message.
    if cfg.statsd_host and cfg.logger_class is PlantsLogger:
        raise ValueError(
            'statsd_host: it needs --logger-class gunicorn.instrument.statsd.Statsd'
        )
    return settings


def _open_store_once(settings: Settings, cfg: Config) -> None:
    """Create or recover the store, as the user that serves (``--user``).

    Raises:
        StoreError: It cannot be opened.
        OSError: There is no such user.
    """
    user, group = os.geteuid(), os.getegid()
    os.setegid(cfg.gid)
    os.seteuid(cfg.uid)
    try:
        with open_store(settings.store, create='always') as store:
            store.ping()
    finally:
        os.seteuid(user)
        os.setegid(group)


def _build(settings: Settings, cfg: Config, metrics: bool | Processes) -> Served:
    """Build what workers serve; open nothing.

    Raises:
        ValueError: A schema is not valid, for example.
    """
    is_gevent = issubclass(cfg.worker_class, PlantsWorker)
    store = open_store(
        settings.store,
        create='never',
        scheduler=GeventScheduler() if is_gevent else THREADS,
    )
    application = app.create_app(
        store,
        # Only a check or a rehearsal has no tokens, and neither serves.
        tokens=settings.tokens or secrets.token_urlsafe(),
        max_body_bytes=settings.max_body_bytes,
        metrics=metrics,
        cors_origins=settings.cors_origins,
    )
    return Served(settings, store, application)


# ---- hooks, in the order of a server's life


def on_starting(server: Arbiter) -> None:
    """Build what is served, or refuse the start with a sentence.

    With no token configured a random one is made: the service never runs open.
    """
    global _made_token
    if not _is_ours(server.app):
        return
    try:
        _check_addresses(server.cfg)
        if Settings.from_environ(os.environ).tokens is None:
            # A reload and an upgrade find it in the environment.
            os.environ['PLANTS_TOKENS'] = _made_token = secrets.token_urlsafe()
        settings = _settings(server.cfg, os.environ)
        metrics = _metrics(server, settings)
        _build(settings, server.cfg, metrics=False)  # refuses before a file is made
        _open_store_once(settings, server.cfg)
        _preload(server, _build(settings, server.cfg, metrics))
    except (ValueError, StoreError, OSError) as ex:
        server.log.critical('%s', ex)
        internals.remove_pidfile(server)
        # With the log in a file the operator may look only at the terminal.
        sys.exit(1 if server.cfg.errorlog == '-' else f'Error: {ex}')


def when_ready(server: Arbiter) -> None:
    """Say once what is served, and where, now that the address is known."""
    if _served is None:
        return
    signal.signal(signal.SIGHUP, Rehearsal(server).on_hangup)
    settings = _served.settings
    addresses = internals.bound_addresses(server)
    if not addresses:  # each worker binds its own (reuse_port)
        addresses = [f'http://{host}:{port}' for host, port in server.cfg.address]
    urls = [
        address.replace('0.0.0.0', '127.0.0.1')
        for address in addresses
        if address.startswith('http')  # not unix:
    ]
    members = {'address': ', '.join(addresses), **_summary(server.cfg, settings)}
    if urls:
        members['page'] = f'{urls[0]}/docs'
    log.info(_template(members), {'message': 'the plant store is ready', **members})
    if _made_token is not None:
        # Printed, not logged: log files may be kept and read by others.
        notice = new_token_notice(_made_token, urls[0] if urls else 'http://HOST:PORT')
        print(notice, file=sys.stderr, flush=True)


def pre_fork(server: Arbiter, worker: Worker) -> None:
    """Give a worker the smallest number that no other worker has."""
    if isinstance(worker, PlantsWorker):
        # Workers from before a reload may be of another class, without a number.
        siblings = internals.siblings(server)
        taken = {getattr(sibling, 'number', None) for sibling in siblings}
        worker.number = next(number for number in count() if number not in taken)
    # Without this the garbage collector of a worker writes to every object that the
    # master has made. So the memory of these objects would no longer be shared.
    gc.freeze()


def post_fork(server: Arbiter, worker: Worker) -> None:
    """Begin a worker's life."""
    internals.reset_signals(server)
    counters.join(_worker_name(server, worker))


def worker_exit(server: Arbiter, worker: Worker) -> None:
    """Close the store in a worker that ends."""
    if _served is not None:
        _served.store.close()


def child_exit(server: Arbiter, worker: Worker) -> None:
    """Remove the connection count and the gauges of a worker that has ended."""
    if isinstance(worker, PlantsWorker):
        worker.forget_connections()
    counters.leave(_worker_name(server, worker))


def nworkers_changed(server: Arbiter, new: int, old: int | None) -> None:
    """Keep to one worker with a store in memory, also on SIGTTIN."""
    if _served is not None and is_in_memory(os.environ) and new > 1:
        server.log.error('PLANTS_STORE: memory: needs one worker, not %d', new)
        server.num_workers = 1


def on_reload(server: Arbiter) -> None:
    """Build the application again, with the current code, schemas and settings."""
    if not _is_ours(server.app):
        return
    try:
        settings = _settings(server.cfg, os.environ)
        open_store(settings.store, create='always').close()
        _preload(server, _build(settings, server.cfg, _metrics(server, settings)))
    except Exception as ex:
        # The rehearsal has just passed: a file has changed since.
        server.log.error('Reloaded gunicorn.conf.py, not the application: %s', ex)
    signal.signal(signal.SIGHUP, Rehearsal(server).on_hangup)
    # Free what this reload has replaced; pre_fork() has frozen it.
    gc.unfreeze()
    gc.collect()


def pre_exec(server: Arbiter) -> None:
    """Give the master of an upgrade (SIGUSR2) our command, token and counters."""
    internals.use_same_command(server)
    internals.hand_over(server, 'PLANTS_TOKENS', counters.DIRECTORY_VARIABLE)


def on_exit(server: Arbiter) -> None:
    """Remove the counters, unless the other master of an upgrade still uses them."""
    if not internals.is_upgrading(server):
        counters.remove()


# ---- what the hooks share


def _check_addresses(cfg: Config, bound: Sequence[str] = ()) -> None:
    """Check that the addresses are free.

    gunicorn itself tries an address five times, with many log lines. On a reload it has
    closed its old sockets by then, and the server ends.

    Args:
        cfg: gunicorn's settings.
        bound: The addresses at which the server listens already, as in ``cfg.bind``.

    Raises:
        ValueError: An address is not free.
    """
    if cfg.reuse_port or os.environ.keys() & {'GUNICORN_FD', 'LISTEN_FDS'}:
        return  # the addresses may be shared, or the sockets are inherited
    for name, address in zip(cfg.bind, cfg.address, strict=True):
        if name in bound or not isinstance(address, tuple):
            continue
        family = socket.AF_INET6 if ':' in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(address)
            except OSError as ex:
                place = f'{address[0]}:{address[1]}'
                raise ValueError(f'bind: {place}: {ex.strerror}') from ex


def _preload(server: Arbiter, served: Served) -> None:
    """Have all workers that are forked from now on serve an application."""
    global _served
    _served = served
    internals.preload(server.app, served.application)


def _metrics(server: Arbiter, settings: Settings) -> bool | Processes:
    return settings.metrics and counters.share(server.cfg, str(server.pid))


def _worker_name(server: Arbiter, worker: Worker) -> str:
    """Return the name of a worker; after its end another worker may have the name."""
    # NOTE: not isinstance(), because old workers are of the class before a reload.
    number = getattr(worker, 'number', worker.age)
    return f'{server.pid}-{number}'


class Rehearsal:
    """Tries a reload in a process of its own before gunicorn begins it.

    gunicorn ends a server that works when its new workers do not start. So everything
    that a reload takes up (code, schemas, configuration, the store) is tried first.
    The master goes on meanwhile: signals and the heartbeat of workers do not wait.

    Args:
        server: The master. Its main thread must make and use this object.
    """

    def __init__(self, server: Arbiter) -> None:
        self._reload = partial(server.signal, signal.SIGHUP, None)
        arguments, self._directory = internals.start_command(server)
        root = str(Path(__file__).absolute().parent.parent)
        own = [root, str(REHEARSAL_TIMEOUT + 1), ' '.join(server.cfg.bind)]
        self._command = [sys.executable, '-c', REHEARSAL_CODE, *own, *arguments]
        self._lock = threading.Lock()  # held by the thread that rehearses
        self._is_waiting = False  # whether a thread waits for the lock

    def on_hangup(self, number: int, frame: object) -> None:
        """Handle SIGHUP."""
        if not self._is_waiting:
            self._is_waiting = True
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._lock:
            self._is_waiting = False  # a later signal may mean later files
            failure = self._rehearse()
        if failure:
            log.error('Not reloaded, the server goes on as before: %s', failure)
        else:
            self._reload()

    def _rehearse(self) -> str | None:
        """Return why a start would not work now, or ``None``."""
        environ = dict(os.environ)
        environ.pop(counters.DIRECTORY_VARIABLE, None)
        try:
            process = subprocess.run(
                self._command,
                cwd=self._directory,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=REHEARSAL_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return f'it was not ready to start within {REHEARSAL_TIMEOUT} s'
        # NOTE: the exit code may be lost, because gunicorn waits for all children of
        # the master, and so for this one.
        if REHEARSAL_PASSED in process.stdout:
            return None
        return process.stderr.strip() or 'it ended early'


def _summary(cfg: Config, settings: Settings) -> dict[str, object]:
    """Return what a check or a start says about a server, by label."""
    tokens: object = 'none configured, one will be made'
    if settings.tokens is not None:
        tokens = len(settings.tokens)
    return {'store': masked(settings.store), 'tokens': tokens, 'workers': cfg.workers}


def _template(members: Mapping[str, object]) -> str:
    """Return the template of a message with a line for each member."""
    return '\n'.join(['%(message)s', *(f'    {name:9}%({name})s' for name in members)])
