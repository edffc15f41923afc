"""What a server serves: made by a start, by each reload, and by ``--check-config``.

Workers inherit the application and the loaded store; a reload makes both anew.
"""

import errno
import logging
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from gunicorn import __version__
from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.config import Config
from gunicorn.sock import _sock_type, close_sockets, ssl_context

from app import PlantsApp, create_app
from serving.log import PlantsLogger
from serving.scheduler import GeventScheduler
from serving.worker import PlantsWorker
from store import THREADS, StoreError, StoreUnavailable, open_store
from store.jsonl.disk import file_system
from web.settings import Settings
from web.tokens import MADE_TOKEN, TokensFile

log = logging.getLogger('plants')

GUNICORN = '27.0.1'  # as in requirements.txt
ENDING = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT
ONE_WORKER = 'PLANTS_STORE: memory: needs one worker'
# How the names of gunicorn's settings begin that have no effect on our worker.
NO_EFFECT = (
    'asgi_|casefold_|dirty_|do_|dogstatsd_|enable_backlog_|forwarder_|header_map|http|'
    'limit_|on_dirty_|permit_|post_request|pre_request|protocol|proxy_|reload|root_|'
    'ssl_version|statsd_|strip_|suppress_|threads|tmp_upload_|uwsgi_|websocket_|'
    'control_socket(_mode)?$'
)


def build() -> PlantsApp:
    """Make the application of a start; end the process if anything is wrong."""
    # gunicorn has handlers after the load: until then process 1 would ignore a signal.
    for number in ENDING:
        signal.signal(number, lambda *_: sys.exit(0))
    if __version__ != GUNICORN:
        log.warning('gunicorn %s is not %s, which was tried', __version__, GUNICORN)
    try:
        return make(WSGIApplication().cfg)  # read again: gunicorn passes none
    except (ValueError, OSError, RuntimeError, StoreError) as ex:
        log.critical('%s', ex)
        sys.exit(1)


def make(cfg: Config, served: Any = None) -> PlantsApp:
    """Make what is configured, beside what is served; a check opens no store."""
    os.environ |= cfg.env  # as gunicorn does, but later in a reload, never in a check
    # libpq would look for certificates in the directory of the user that starts.
    if cfg.uid and os.environ.get('HOME') == os.path.expanduser('~root'):
        del os.environ['HOME']
    settings = Settings.from_environ(os.environ)
    is_ours = issubclass(cfg.worker_class, PlantsWorker)
    if faults := [*_faults(cfg, settings, served, is_ours)]:
        raise ValueError('\n'.join(faults))
    waits = GeventScheduler() if is_ours else THREADS
    store = open_store(settings.store, create=False, scheduler=waits)
    ours = {'store': store, 'tokens': settings.tokens or MADE_TOKEN}
    app = create_app(**vars(settings) | ours)
    app.settings, app.store = settings, store
    if app.metrics:
        app.metrics.share(served and served.metrics)
        if 'PROMETHEUS_MULTIPROC_DIR' in os.environ:
            log.warning('PROMETHEUS_MULTIPROC_DIR: it has no effect here')
    try:
        tempfile.TemporaryFile(dir=cfg.worker_tmp_dir).close()  # as for each worker
        with ExitStack() as stack:  # as the user that serves
            # Not at all if it is the same one: a hardened unit forbids these calls.
            if (cfg.uid, cfg.gid) != (os.geteuid(), os.getegid()):
                stack.callback(os.setegid, os.getegid())
                stack.callback(os.seteuid, os.geteuid())
                os.setegid(cfg.gid)
                os.seteuid(cfg.uid)
            app.tls = ssl_context(cfg) if cfg.is_ssl else None
            if isinstance(settings.tokens, TokensFile):  # to follow its changes
                os.close(os.open(settings.tokens.path, os.O_RDONLY))
            if not (cfg.check_config or cfg.print_config):
                _load(app, makes=not served)
    except OSError as ex:
        names = 'user/group, certfile, keyfile, ca_certs, ciphers, worker_tmp_dir'
        raise ValueError(f'{names}, PLANTS_TOKENS_FILE: {ex}') from ex
    return app


def _faults(cfg: Config, settings: Settings, served: Any, ours: bool) -> Iterator[str]:
    """Yield a sentence for each setting that cannot be served."""
    for name in ('LISTEN_FDS', 'LISTEN_PID', 'GUNICORN_PID'):
        if not os.environ.get(name, '0').isdecimal():
            yield f'{name}: it is not a number: unset it'
    if cfg.loglevel.lower() not in PlantsLogger.LOG_LEVELS:  # gunicorn would take info
        yield f'loglevel: one of {", ".join(PlantsLogger.LOG_LEVELS)}'
    if cfg.logconfig_json and not os.path.exists(cfg.logconfig_json):
        yield 'logconfig_json: there is no such file'  # gunicorn would say nothing
    if min(cfg.workers, cfg.worker_connections) < 1:
        yield 'workers, worker_connections: 1 at least'
    if settings.store == 'memory:' and cfg.workers > 1:
        yield ONE_WORKER
    if served and 'memory:' in (settings.store, served.settings.store):
        yield 'PLANTS_STORE: memory: needs a restart'
    if not settings.tokens and (served.settings.tokens if served else cfg.daemon):
        yield 'PLANTS_TOKENS: nobody would see a made token: set it'
    idle = NO_EFFECT if ours else 'reload|statsd_'
    idle += '' if cfg.certfile else '|ca_certs|cert_reqs|ciphers|keyfile|ssl_context'
    for name, setting in cfg.settings.items():
        if re.match(idle, name) and setting.get() != type(setting)().get():
            yield f'{name}: no effect here, or without certfile; reload by SIGHUP'
    if cfg.reuse_port and 'LISTEN_FDS' in os.environ:
        yield 'reuse_port: nobody would serve the sockets of systemd'
    is_bound = served or os.environ.keys() & {'LISTEN_FDS', 'GUNICORN_FD'}
    if not (is_bound or cfg.check_config or cfg.print_config):
        for address in [each for each in cfg.address if not isinstance(each, int)]:
            try:  # gunicorn takes five seconds, and twelve lines, for one in use
                if isinstance(address, str):
                    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                        if probe.connect_ex(address) == errno.EPROTOTYPE:
                            raise ValueError('it is in use')  # by another server
                close_sockets([_sock_type(address)(address, cfg, log)])
            except (OSError, OverflowError, ValueError) as ex:
                yield f'bind: choose another address with -b or PORT: {address}: {ex}'


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
    if path and (kind := file_system(path)) in ('tmpfs', 'ramfs', 'overlay'):
        log.warning('%s: it is on %s, and may end with this container', path, kind)
