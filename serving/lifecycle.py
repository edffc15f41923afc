"""The life of a server: what it serves, and hooks of gunicorn in their order.

The master makes the application and loads the store before it makes workers, which
inherit both. A reload (SIGHUP) makes both anew, beside what runs.
"""

import atexit
import logging
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from gunicorn import __version__
from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.config import Config
from gunicorn.sock import ssl_context

from app import PlantsApp, create_app
from serving.log import PlantsLogger
from serving.master import ENDING, Master
from serving.scheduler import GeventScheduler
from serving.worker import PlantsWorker
from store import THREADS, StoreError, StoreUnavailable, masked, open_store
from store.jsonl.disk import file_system
from web.settings import Settings
from web.tokens import MADE_TOKEN, show_token

log = logging.getLogger('plants')

GUNICORN = '27.0.1'  # as in requirements.txt
SHORT_LIVED = 'tmpfs', 'ramfs', 'overlay'  # they end with a machine or a container
ONE_WORKER = 'PLANTS_STORE: memory: needs one worker'
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
    try:
        cfg = WSGIApplication().cfg  # as a reload reads it; gunicorn passes none
        # libpq would look for certificates in the directory of the user that starts.
        is_other = cfg.uid != os.geteuid()
        if is_other and os.environ.get('HOME') == os.path.expanduser('~root'):
            del os.environ['HOME']
        return make(cfg, os.environ | cfg.env)
    except (ValueError, OSError, RuntimeError, StoreError) as ex:
        log.critical('%s', ex)
        sys.exit(1)


def make(cfg: Config, environ: Mapping[str, str], served: Any = None) -> PlantsApp:
    """Make what is configured, beside what is served; a check opens no store."""
    settings = Settings.from_environ(environ)
    if faults := [*_faults(cfg, settings, served)]:
        raise ValueError('\n'.join(faults))
    scheduler = GeventScheduler() if _is_ours(cfg) else THREADS
    store = open_store(settings.store, create=False, scheduler=scheduler)
    ours = {'store': store, 'tokens': settings.tokens or MADE_TOKEN}
    app = create_app(**vars(settings) | ours)
    app.settings, app.store = settings, store
    if app.metrics:
        app.metrics.share(served and served.metrics)
        if 'PROMETHEUS_MULTIPROC_DIR' in environ:
            log.warning('PROMETHEUS_MULTIPROC_DIR: it has no effect here')
    try:
        tempfile.TemporaryFile(dir=cfg.worker_tmp_dir).close()  # as for each worker
        with ExitStack() as stack:  # as the user that serves
            uid, gid = os.geteuid(), os.getegid()
            if (uid, gid) != (cfg.uid, cfg.gid):  # a hardened unit forbids these calls
                stack.callback(os.setegid, gid)
                stack.callback(os.seteuid, uid)
                os.setegid(cfg.gid)
                os.seteuid(cfg.uid)
            app.tls = ssl_context(cfg) if cfg.is_ssl else None
            if not (cfg.check_config or cfg.print_config):
                _load(app, makes=not served)
    except OSError as ex:
        raise ValueError(f'user/group, certfile, keyfile, worker_tmp_dir: {ex}') from ex
    return app


def _is_ours(cfg: Config) -> bool:
    return issubclass(cfg.worker_class, PlantsWorker)


def _faults(cfg: Config, settings: Settings, served: Any) -> Iterator[str]:
    """Yield a sentence for each setting that cannot be served."""
    for name in ('LISTEN_FDS', 'LISTEN_PID', 'GUNICORN_PID'):
        if not os.environ.get(name, '0').isdecimal():
            yield f'{name}: it is not a number: unset it'
    if cfg.loglevel.lower() not in PlantsLogger.LOG_LEVELS:  # gunicorn would take info
        yield f'loglevel: one of {", ".join(PlantsLogger.LOG_LEVELS)}'
    if min(cfg.workers, cfg.worker_connections) < 1:
        yield 'workers, worker_connections: 1 at least'
    if settings.store == 'memory:' and cfg.workers > 1:
        yield ONE_WORKER
    if served and 'memory:' in {settings.store} ^ {served.settings.store}:
        yield 'PLANTS_STORE: memory: needs a restart'
    if not settings.tokens and (served.settings.tokens if served else cfg.daemon):
        yield 'PLANTS_TOKENS: nobody would see a made token: set it'
    idle = NO_EFFECT if _is_ours(cfg) else ('reload', 'statsd_')
    for name, setting in cfg.settings.items():
        if name.startswith(idle) and setting.get() != type(setting)().get():
            yield f'{name}: it has no effect here; SIGHUP is for new settings'
    is_bound = served or os.environ.keys() & {'LISTEN_FDS', 'GUNICORN_FD'}
    if not (is_bound or cfg.reuse_port or cfg.check_config or cfg.print_config):
        yield from _taken_addresses(cfg)


def _taken_addresses(cfg: Config) -> Iterator[str]:
    """Try each: gunicorn takes five seconds, and twelve lines, for one in use."""
    for each in [each for each in cfg.address if isinstance(each, tuple)]:
        family = socket.AF_INET6 if ':' in each[0] else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(each)
        except (OSError, OverflowError) as ex:
            yield f'bind: choose another address with -b: {each}: {ex}'


def addresses(port: str) -> list[str]:
    """Return the addresses that stand for all of this machine, with or without IPv6."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(('::', 0))
        leaves_ipv4 = probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return [f'[::]:{port}', f'0.0.0.0:{port}'][: 1 + leaves_ipv4]
    return [f'0.0.0.0:{port}']


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
    server.__class__ = Master
    server.begin(make)
    if server.app.callable.settings.store == 'memory:':
        server.handle_ttin = server.handle_usr2 = partial(log.error, ONE_WORKER)
    # For an upgrade (SIGUSR2): gunicorn knows neither ``-m`` nor options of Python.
    server.START_CTX['args'] = sys.orig_argv


def when_ready(server: Any) -> None:
    """Log what is served after a start or reload, and where, as curl takes it."""
    settings = server.app.callable.settings
    listening = server.LISTENERS or [f'http://{server.cfg.bind[0]}']  # --reuse-port
    url = str(listening[0])
    url = re.sub('unix:(.*)', r'--unix-socket \1 http://localhost', url)
    url = re.sub(r'//(0\.0\.0\.0|\[::\]):', '//127.0.0.1:', url)
    if server.cfg.is_ssl:  # gunicorn writes http for IPv6
        url = url.replace('http:', 'https:')
    if settings.tokens is None and not server.WORKERS:
        show_token(url)
    what, store = 'reloaded' if server.WORKERS else 'started', masked(settings.store)
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
    """Ignore what is for the master: a closed terminal, or pkill, signals all."""
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if metrics := worker.app.callable.metrics:
        metrics.number = worker.number
