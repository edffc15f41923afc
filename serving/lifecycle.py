"""The life of a server: what it serves, and hooks of gunicorn in their order.

The master makes the application and loads the store before it makes workers, which
inherit both. A reload (SIGHUP) makes both anew, beside what runs.
"""

import atexit
import logging
import os
import pwd
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from gunicorn import __version__
from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.config import Config
from gunicorn.sock import ssl_context
from gunicorn.util import is_ipv6

from app import PlantsApp, create_app
from serving.log import PlantsLogger
from serving.master import ENDING, Master
from serving.scheduler import GeventScheduler
from serving.worker import PlantsWorker
from store import THREADS, StoreError, StoreUnavailable, masked, open_store
from store.jsonl.disk import file_system
from web.settings import Settings
from web.tokens import make_token, show_token

log = logging.getLogger('plants')

_block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING)
_unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING)
GUNICORN = '27.0.1'  # as in requirements.txt
NO_UPGRADE = 'SIGUSR2: restart the server instead; plants.socket keeps its clients'
MADE_TOKEN = make_token()  # for a start without a configured one; a reload keeps it
SHORT_LIVED = 'tmpfs', 'ramfs', 'overlay'  # they end with a machine or a container
# How the names of gunicorn's settings begin that have no effect on our worker.
NO_EFFECT = (
    *('asgi_', 'casefold_', 'dirty_', 'do_handshake_', 'dogstatsd_', 'enable_backlog_'),
    *('forwarder_', 'header_map', 'http_', 'http2_', 'limit_request_', 'on_dirty_'),
    *('permit_', 'post_request', 'pre_request', 'protocol', 'proxy_', 'reload'),
    *('root_path', 'ssl_version', 'statsd_', 'strip_header_', 'suppress_ragged_'),
    *('threads', 'tmp_upload_', 'uwsgi_', 'websocket_'),
)


def build() -> PlantsApp:
    """Make the application of a start; end the process if anything is wrong."""
    # gunicorn has handlers after the load: until then process 1 would ignore a signal.
    for number in ENDING:
        signal.signal(number, lambda *_: sys.exit(0))
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_end)
    try:
        cfg = WSGIApplication().cfg  # as a reload reads it; gunicorn passes none
        _set_home(cfg)
        return make(cfg, os.environ | cfg.env)
    except (ValueError, OSError, RuntimeError, StoreError) as ex:
        log.critical('%s', ex)
        sys.exit(1)


def _end() -> None:
    """Let a signal end a worker that would leave it to the handlers of the master."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    _unblock()


def make(cfg: Config, environ: Mapping[str, str], served: Any = None) -> PlantsApp:
    """Make what is configured, beside what is served; a check opens no store."""
    settings = Settings.from_environ(environ)
    if faults := [*_faults(cfg, environ, settings, served)]:
        raise ValueError('\n'.join(faults))
    opens = not (cfg.check_config or cfg.print_config)
    if opens and not served:
        _wait_for_addresses(cfg)
    scheduler = GeventScheduler() if _is_ours(cfg) else THREADS
    store = open_store(settings.store, create=False, scheduler=scheduler)
    try:
        tempfile.TemporaryFile(dir=cfg.worker_tmp_dir).close()  # as for each worker
        tokens = settings.tokens or MADE_TOKEN
        app = create_app(store, tokens=tokens, **settings.app_options())
        app.settings, app.store = settings, store
        if app.metrics:
            app.metrics.share(served and served.metrics)
            if 'PROMETHEUS_MULTIPROC_DIR' in environ:
                log.warning('PROMETHEUS_MULTIPROC_DIR: it has no effect here')
        with _as_user(cfg):
            app.tls = ssl_context(cfg) if cfg.is_ssl else None
            if opens:
                _load(app, makes=not served)
    except OSError as ex:
        raise ValueError(f'user/group, certfile, keyfile, worker_tmp_dir: {ex}') from ex
    return app


def _is_ours(cfg: Config) -> bool:
    return issubclass(cfg.worker_class, PlantsWorker)


def _faults(
    cfg: Config, environ: Mapping[str, str], settings: Settings, served: Any
) -> Iterator[str]:
    """Yield a sentence for each setting that cannot be served."""
    names = NO_EFFECT if _is_ours(cfg) else ('reload', 'statsd_')
    for name, setting in cfg.settings.items():
        if name.startswith(names) and setting.get() != type(setting)().get():
            yield f'{name}: it has no effect here; SIGHUP is for new settings'
    for name in ('LISTEN_FDS', 'LISTEN_PID'):
        if not environ.get(name, '0').isdecimal():
            yield f'{name}: it is not a number: unset it'
    if any(port > 65535 for _, port in _tcp(cfg)):
        yield 'bind: a port is at most 65535'
    if min(cfg.workers, cfg.worker_connections) < 1:
        yield 'workers, worker_connections: 1 at least'
    if settings.store == 'memory:' and cfg.workers > 1:
        yield 'PLANTS_STORE: memory: needs one worker'
    if served and 'memory:' in {settings.store} ^ {served.settings.store}:
        yield 'PLANTS_STORE: memory: needs a restart'
    if not settings.tokens and (served.settings.tokens if served else cfg.daemon):
        yield 'PLANTS_TOKENS: nobody would see a made token: set it'


def _set_home(cfg: Config) -> None:
    """Give HOME of the user that serves to libpq, unless it was set on purpose."""
    with suppress(KeyError):
        inherited = {None, '', pwd.getpwuid(os.geteuid()).pw_dir}
        if cfg.uid != os.geteuid() and os.environ.get('HOME') in inherited:
            os.environ['HOME'] = pwd.getpwuid(cfg.uid).pw_dir


def addresses(port: str) -> list[str]:
    """Return the addresses that stand for all of this machine, with or without IPv6."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(('::', 0))
        if not probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
            return [f'[::]:{port}']  # IPv4, too
        return [f'0.0.0.0:{port}', f'[::]:{port}']
    return [f'0.0.0.0:{port}']


def _tcp(cfg: Config) -> list[tuple[str, int]]:
    return [each for each in cfg.address if isinstance(each, tuple)]


def _wait_for_addresses(cfg: Config) -> None:
    """Wait a second for a server that ends; gunicorn takes five, and twelve lines."""
    if cfg.reuse_port or 'LISTEN_FDS' in os.environ:
        return  # of a socket that is there
    late = time.monotonic() + 1
    for host, port in _tcp(cfg):
        family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        while True:
            try:
                with socket.socket(family) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((host, port))
                break
            except OSError as ex:
                if time.monotonic() > late:
                    reason = f'bind: choose another with -b: {host}:{port}'
                    raise ValueError(f'{reason}: {ex.strerror}') from ex
            time.sleep(0.05)


@contextmanager
def _as_user(cfg: Config) -> Iterator[None]:
    """Be the user that serves."""
    uid, gid = os.geteuid(), os.getegid()
    if (uid, gid) == (cfg.uid, cfg.gid):  # a hardened unit forbids these calls
        yield
        return
    os.setegid(cfg.gid)
    os.seteuid(cfg.uid)
    try:
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)


def _load(app: PlantsApp, makes: bool) -> None:
    """Load the store; a start makes one that is missing, a reload never."""
    try:
        app.store.load()
    except StoreUnavailable:  # perhaps it is missing
        if not makes:
            raise
        with open_store(app.settings.store, create=True) as made:
            made.ping()
        app.store.load()
    path = getattr(app.store, 'path', None)
    if path is not None and (kind := file_system(path)) in SHORT_LIVED:
        log.warning('%s: it is on %s, and may end with this container', path, kind)


def on_starting(server: Any) -> None:
    """Prepare for the signals that come, and for a start that fails."""
    if not hasattr(server.app.callable, 'store'):
        log.critical('leave wsgi_app and preload_app as gunicorn.conf.py has them')
        sys.exit(1)
    if __version__ != GUNICORN:
        log.warning('gunicorn %s is not %s, which was tried', __version__, GUNICORN)
    # In a worker, too; the last first. ``logging`` closes files before it flushes ours.
    atexit.register(PlantsLogger.buffer.flush)
    atexit.register(lambda: server.app.callable.store.close())
    Master(server, make, partial(say, server))
    if server.app.callable.settings.store == 'memory:':
        needs_one = partial(log.error, 'PLANTS_STORE: memory: needs one worker')
        server.handle_ttin = needs_one
    server.handle_usr2 = partial(log.error, NO_UPGRADE)


def when_ready(server: Any) -> None:
    """Show the token that was made, and log what is served, and where."""
    if server.app.callable.settings.tokens is None:
        show_token(MADE_TOKEN, _url(server))
    say(server, 'started')


def _url(server: Any) -> str:
    """Return where a client on this machine finds the server, as curl takes it."""
    url = str((server.LISTENERS or server.cfg.bind)[0])
    url = re.sub('unix:(.*)', r'--unix-socket \1 http://localhost', url)
    if server.cfg.is_ssl:  # gunicorn writes http for IPv6
        url = url.replace('http:', 'https:')
    return re.sub(r'//(0\.0\.0\.0|\[::\]):', '//127.0.0.1:', url)


def say(server: Any, what: str) -> None:
    """Log what is served, after a start and after a reload."""
    store = masked(server.app.callable.settings.store)
    url = _url(server)
    log.info('%s: the store %s is ready; to try it: %s/docs', what, store, url)


def pre_fork(server: Any, worker: Any) -> None:
    """Have the worker inherit the tokens that are valid now, and none from before.

    It has the lowest number that no living process of this server has.
    """
    taken = {0, *(each.number for each in server.WORKERS.values())}
    worker.number = min({*range(len(taken) + 1)} - taken)
    if tokens := server.app.callable.settings.tokens:
        tokens.refresh()


def post_worker_init(worker: Any) -> None:
    """Ignore SIGHUP, which also the workers get when a terminal is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if metrics := worker.app.callable.metrics:
        metrics.number = worker.number
