"""The life of a server: what it serves, and hooks of gunicorn in their order.

The master makes the application and loads the store before it makes workers, which
inherit both. A reload (SIGHUP) does the same beside what runs: nothing is assigned, so
that nothing has to be put back, before all of it has worked.
"""

import atexit
import io
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stderr, suppress
from functools import partial
from shutil import rmtree
from typing import Any

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.config import Config
from gunicorn.pidfile import Pidfile
from gunicorn.sock import ssl_context

from app import PlantsApp, create_app
from serving.log import PlantsLogger
from serving.scheduler import GeventScheduler
from serving.worker import PlantsWorker
from store import THREADS, PlantStore, StoreError, StoreUnavailable, masked, open_store
from store.jsonl.disk import file_system
from web.settings import Settings
from web.tokens import make_token, show_token

log = logging.getLogger('plants')

MADE_TOKEN = make_token()  # for a start without a configured one; a reload keeps it
ENDING = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT
_block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING)
_unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING)
COUNTERS = 'PROMETHEUS_MULTIPROC_DIR'
FIXED = 'bind', 'reuse_port', 'user', 'group', 'pidfile', 'worker_class'  # in reloads
SHORT_LIVED = 'tmpfs', 'ramfs', 'overlay'  # they end with a machine or a container


def build() -> PlantsApp:
    """Make the application of a start; end the process if anything is wrong."""
    # gunicorn has handlers after the load: until then process 1 would ignore a signal.
    for number in ENDING:
        signal.signal(number, lambda *_: sys.exit(0))
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_end)
    try:
        cfg = WSGIApplication().cfg  # what gunicorn has read, too, and does not pass
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
    in_memory = settings.store == 'memory:'
    was_in_memory = served.settings.store == 'memory:' if served else in_memory
    room = cfg.worker_connections
    ports = [each[1] for each in cfg.address if isinstance(each, tuple)]
    unseen = not settings.tokens and (served.settings.tokens if served else cfg.daemon)
    wrong = {
        'reload: it is not supported; for new settings send SIGHUP': cfg.reload,
        'bind: a port is at most 65535': max(ports, default=0) > 65535,
        'workers, worker_connections: 1 at least': min(cfg.workers, room) < 1,
        'PLANTS_STORE: memory: needs one worker': in_memory and cfg.workers > 1,
        'PLANTS_STORE: memory: needs a restart': in_memory != was_in_memory,
        'PLANTS_TOKENS: nobody would see a made token: set it': unseen,
    }
    if any(wrong.values()):
        raise ValueError('\n'.join(filter(wrong.get, wrong)))
    is_ours = issubclass(cfg.worker_class, PlantsWorker)
    if served and served.settings.store == settings.store:
        store = served.store  # with all that it has read
    else:
        scheduler = GeventScheduler() if is_ours else THREADS
        store = open_store(settings.store, create=False, scheduler=scheduler)
    try:
        # As before each fork, where a failure would end the server.
        tempfile.TemporaryFile(dir=cfg.worker_tmp_dir).close()
        tls = _load(cfg, settings, store)
    except OSError as ex:
        raise ValueError(f'user/group, certfile, keyfile, worker_tmp_dir: {ex}') from ex
    tokens = settings.tokens or MADE_TOKEN
    app = create_app(store, tokens=tokens, **settings.app_options())
    vars(app).update(settings=settings, store=store, tls=tls)  # for hooks and workers
    return app


def _load(cfg: Config, settings: Settings, store: PlantStore) -> Any:
    """Read certificate and store as the user that serves; return what TLS needs."""
    with ExitStack() as stack:
        # Not to the same user: a hardened unit forbids these calls.
        if (os.geteuid(), os.getegid()) != (cfg.uid, cfg.gid):
            stack.callback(os.setegid, os.getegid())
            stack.callback(os.seteuid, os.geteuid())
            os.setegid(cfg.gid)
            os.seteuid(cfg.uid)
        tls = ssl_context(cfg) if cfg.is_ssl else None
        if cfg.check_config or cfg.print_config:
            return tls
        try:
            store.load()
        except StoreUnavailable:  # perhaps it is missing
            with open_store(settings.store, create=True) as made:
                made.ping()
            store.load()
        if settings.metrics_token and COUNTERS not in os.environ:
            # Before their package is imported, which then chooses its mode.
            place = tempfile.mkdtemp(prefix='plants-', dir=cfg.worker_tmp_dir)
            os.environ[COUNTERS], pid = place, os.getpid()  # no worker removes it
            atexit.register(lambda: rmtree(place, True) if os.getpid() == pid else None)
    path = getattr(store, 'path', None)
    if path is not None and (kind := file_system(path)) in SHORT_LIVED:
        log.warning('%s: it is on %s, and may end with this container', path, kind)
    return tls


def on_starting(server: Any) -> None:
    """Prepare for the signals that come, and for a start that fails."""
    if not hasattr(server.app.callable, 'store'):
        log.critical('name no application: gunicorn.conf.py makes the one to serve')
        sys.exit(1)
    # In a worker, too; the last first. ``logging`` closes files before it flushes ours.
    atexit.register(PlantsLogger.buffer.flush)
    atexit.register(lambda: server.app.callable.store.close())
    hears = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # not after ``nohup``
    terminals = [number for number in range(3) if hears and os.isatty(number)]
    server.handle_hup = partial(_hang_up, server, server.handle_hup, terminals)
    server.app.reload = lambda: None  # it would read the configuration again
    if server.app.callable.settings.store == 'memory:':
        server.handle_ttin = partial(log.error, 'SIGTTIN: memory: needs one worker')
    # An upgrade (SIGUSR2) after ``python -m gunicorn``: not in the path of its package.
    if server.START_CTX['args'][1].endswith('__main__.py'):
        server.START_CTX['args'][1:2] = ['-m', 'gunicorn']


def when_ready(server: Any) -> None:
    """Show the token that was made, and log what is served, and where."""
    settings = server.app.callable.settings
    url = str((server.LISTENERS or server.cfg.bind)[0]).replace('0.0.0.0', '127.0.0.1')
    if settings.tokens is None:
        to = re.sub('unix:(.*)', r'--unix-socket \1 http://localhost', url)
        show_token(MADE_TOKEN, to)
    log.info('the store %s is ready; to try it: %s/docs', masked(settings.store), url)


def pre_fork(server: Any, worker: Any) -> None:
    """Read what was appended to the store since, if nobody has to wait for that."""
    try:
        pass
    except Exception as ex:
        log.warning('the store was not read before a fork: %s', ex)


def post_worker_init(worker: Any) -> None:
    """Ignore SIGHUP, which also the workers get when a terminal is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _hang_up(server: Any, reload: Callable[[], None], terminals: list[int]) -> None:
    """Handle SIGHUP: reload, or end the server if its terminal was closed."""
    if terminals and not any(map(os.isatty, terminals)):
        raise StopIteration  # as gunicorn's handler of SIGTERM
    old, printed = server.cfg, io.StringIO()
    try:
        with redirect_stderr(printed):
            cfg = WSGIApplication().cfg
        for name in FIXED:
            if getattr(cfg, name) != getattr(old, name):
                raise ValueError(f'{name}: another one needs a restart')
        if server.pidfile:  # gunicorn makes it anew, and would end if that failed
            Pidfile(cfg.pidfile).create(server.pid)
        # Without the variables of the old raw_env, which gunicorn removes later.
        theirs = {name: os.environ[name] for name in os.environ.keys() - old.env.keys()}
        new = make(cfg, old.env_orig | theirs | cfg.env, server.app.callable)
    except (Exception, SystemExit) as ex:
        with suppress(OSError):
            os.chdir(old.chdir)  # all that gunicorn has changed
        said = printed.getvalue() if isinstance(ex, SystemExit) else str(ex)
        said = re.sub(r'(?s)\[?Traceback.*\n(?=\w)', '', said)
        log.error('Not reloaded, and nothing has changed: %s', ' '.join(said.split()))
    else:
        cfg.env_orig = old.env_orig
        server.app.cfg, server.app.callable = cfg, new
        reload()
