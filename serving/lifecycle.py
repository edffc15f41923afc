"""The life of a server: what it serves, and hooks of gunicorn in their order.

The master makes the application and loads the store before it makes workers, which
inherit both. A reload (SIGHUP) does the same beside what runs, and assigns it last.
"""

import atexit
import io
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, suppress
from functools import partial
from typing import Any

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.config import Config
from gunicorn.sock import ssl_context

from app import PlantsApp, create_app
from serving.scheduler import GeventScheduler
from serving.worker import PlantsWorker
from store import THREADS, PlantStore, StoreError, StoreUnavailable, masked, open_store
from store.jsonl.disk import file_system
from web.settings import Settings
from web.tokens import make_token, show_token

log = logging.getLogger('plants')

COUNTERS = 'PROMETHEUS_MULTIPROC_DIR'
FIXED = 'bind', 'reuse_port', 'user', 'group', 'pidfile'  # a reload cannot change them
SHORT_LIVED = 'tmpfs', 'ramfs', 'overlay'  # they end with a machine or a container


def build() -> PlantsApp:
    """Make the application of a start; end the process if anything is wrong."""
    # gunicorn sets its handlers after the load, and a worker some time after its fork.
    # Until then process 1 would ignore a signal, and a worker leave it to the master.
    _end_by_signals()
    os.register_at_fork(after_in_child=_end_by_signals)
    try:
        cfg = WSGIApplication().cfg  # what gunicorn has read, too, and does not pass
        return make(cfg, os.environ | cfg.env)
    except (ValueError, OSError, RuntimeError, StoreError) as ex:
        log.critical('%s', ex)
        sys.exit(1)


def _end_by_signals() -> None:
    for number in signal.SIGTERM, signal.SIGINT, signal.SIGQUIT:
        signal.signal(number, lambda *_: sys.exit(0))


def _at_exit(function: Callable[[], object]) -> None:
    """Call a function when this process ends, however a start fails; no worker does."""
    pid = os.getpid()
    atexit.register(lambda: os.getpid() == pid and function())


def make(cfg: Config, environ: Mapping[str, str], served: Any = None) -> PlantsApp:
    """Make what a configuration describes, beside the application that is served.

    ``gunicorn --check-config`` opens no store. A ``ValueError`` has a line a fault.
    """
    settings, place = Settings.from_environ(environ), cfg.worker_tmp_dir
    made_token = '' if settings.tokens or cfg.daemon else make_token()
    if served:
        made_token = served.made_token
    in_memory, is_open = settings.store == 'memory:', settings.tokens or made_token
    wrong = {
        'reload: it is not supported; for new settings send SIGHUP': cfg.reload,
        f'workers: {cfg.workers} would answer no request': cfg.workers < 1,
        'PLANTS_STORE: memory: needs one worker': in_memory and cfg.workers > 1,
        'PLANTS_TOKENS: nobody would see a made token: set it': not is_open,
        f'worker_tmp_dir: {place} is not a directory': not os.path.isdir(place or '/'),
    }
    if any(wrong.values()):
        raise ValueError('\n'.join(filter(wrong.get, wrong)))
    if settings.metrics_token and not cfg.check_config and COUNTERS not in os.environ:
        # Now, as their package chooses its mode when it is imported.
        os.environ[COUNTERS] = path = tempfile.mkdtemp(prefix='plants-', dir=place)
        _at_exit(partial(shutil.rmtree, path, ignore_errors=True))
        os.chown(path, cfg.uid, cfg.gid)
    is_ours = issubclass(cfg.worker_class, PlantsWorker)
    if served and served.settings.store == settings.store:
        store = served.store  # with all that it has read
    else:
        scheduler = GeventScheduler() if is_ours else THREADS
        store = open_store(settings.store, create=False, scheduler=scheduler)
    tokens = settings.tokens or made_token
    app = create_app(store, tokens=tokens, **settings.app_options())
    vars(app).update(settings=settings, store=store, made_token=made_token)
    user, group = os.geteuid(), os.getegid()
    try:
        os.setegid(cfg.gid)
        os.seteuid(cfg.uid)
        if cfg.is_ssl:
            ssl_context(cfg)
        if not cfg.check_config:
            load(store, settings.store)
    except OSError as ex:
        raise ValueError(f'user, group, certfile, keyfile: {ex}') from ex
    finally:
        os.seteuid(user)
        os.setegid(group)
    return app


def load(store: PlantStore, url: str) -> None:
    """Make a store if it is missing, and read it, however long that takes."""
    try:
        store.load()
    except StoreUnavailable:  # perhaps it is missing
        with open_store(url, create=True) as made:
            made.ping()
        store.load()
    path = getattr(store, 'path', None)
    if path is not None and (kind := file_system(path)) in SHORT_LIVED:
        log.warning('%s: it is on %s, and may end with this container', path, kind)


def on_starting(server: Any) -> None:
    """Prepare for the signals that come, and for a start that fails."""
    atexit.register(lambda: server.app.callable.store.close())  # in a worker, too
    _at_exit(lambda: server.pidfile and server.pidfile.unlink())
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # by nohup
    terminals = [] if is_ignored else list(filter(os.isatty, range(3)))
    server.handle_hup = partial(_hang_up, server, server.handle_hup, terminals)
    server.app.reload = lambda: None  # it would read the configuration again
    if server.app.callable.settings.store == 'memory:':  # not shared with a second one
        refusal = 'SIGTTIN: PLANTS_STORE: memory: needs one worker'
        server.handle_ttin = partial(log.error, refusal)
    # An upgrade (SIGUSR2) executes these words. After ``python -m gunicorn`` there is a
    # path in gunicorn's package, whose modules would hide others.
    if server.START_CTX['args'][1].endswith('__main__.py'):
        server.START_CTX['args'][1:2] = ['-m', 'gunicorn']


def when_ready(server: Any) -> None:
    """Show the token that was made, and log what is served, and where."""
    url = str((server.LISTENERS or server.cfg.bind)[0]).replace('0.0.0.0', '127.0.0.1')
    if token := server.app.callable.made_token:
        show_token(token, url)
    shown = masked(server.app.callable.settings.store)
    log.info('the plant store %s is ready; to try it: %s/docs', shown, url)


def pre_fork(server: Any, worker: Any) -> None:
    """Read what was appended to the store since, if nobody has to wait for that."""
    try:
        server.app.callable.store.load(wait=False)
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
