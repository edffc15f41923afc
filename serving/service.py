"""What a server serves: the application and the store that its workers inherit.

One function builds it, for a start, a reload and ``gunicorn --check-config``: settings,
tokens, schemas, TLS. Another one loads the store, which a check does not do.
"""

import atexit
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.config import Config
from gunicorn.sock import ssl_context

from app import PlantsApp, create_app
from serving.scheduler import GeventScheduler
from serving.worker import PlantsWorker
from store import THREADS, PlantStore, StoreUnavailable, open_store
from store.jsonl.disk import file_system
from web.settings import Settings, is_in_memory
from web.tokens import make_token

log = logging.getLogger('plants')

# File systems whose files end with a machine or a container.
SHORT_LIVED = {'tmpfs', 'ramfs', 'overlay'}


class Service(NamedTuple):
    """What a master serves, and its workers inherit."""

    settings: Settings
    store: PlantStore
    app: PlantsApp


services: list[Service] = []  # what this master serves: one, after ``build``
made_tokens: list[str] = []  # because none was configured; a reload keeps it
counters: list[str] = []  # the directory of the metrics


def default_workers() -> int:
    """Return the number of workers: one for each core, or 1 with a store in memory."""
    if is_in_memory(os.environ):
        return 1
    if hasattr(os, 'sched_getaffinity'):  # macOS has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def build() -> PlantsApp:
    """Build the application for gunicorn; end the process if anything is wrong."""
    try:
        cfg = WSGIApplication().cfg  # what gunicorn has read, too, and does not pass
        services[:] = [build_from(cfg, os.environ | cfg.env)]
    except (ValueError, OSError, RuntimeError) as ex:
        end(ex)
    return services[0].app


def build_from(cfg: Config, environ: Mapping[str, str]) -> Service:
    """Build what a configuration describes, beside what runs.

    Raises:
        ValueError: It is wrong; with a line for each fault.
    """
    wrong = []
    try:
        settings = Settings.from_environ(environ)
    except ValueError as ex:
        wrong.append(str(ex))
    wrong += _wrong_settings(cfg, environ)
    if wrong:
        raise ValueError('\n'.join(wrong))
    if settings.tokens is None and not made_tokens:
        if cfg.daemon or services:
            raise ValueError('PLANTS_TOKENS: nobody would see a made token: set it')
        made_tokens.append(make_token())
    if settings.metrics_token and not cfg.check_config:
        _share_counters(cfg)
    if services and services[0].settings.store == settings.store:
        store = services[0].store  # with all that it has read
    else:
        is_ours = issubclass(cfg.worker_class, PlantsWorker)
        scheduler = GeventScheduler() if is_ours else THREADS
        store = open_store(settings.store, create=False, scheduler=scheduler)
    tokens = settings.tokens or made_tokens
    app = create_app(store, tokens=tokens, **settings.app_options())
    return Service(settings, store, app)


def _wrong_settings(cfg: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each setting of gunicorn that cannot serve."""
    if cfg.reload:
        yield 'reload: it is not supported; for new settings send SIGHUP'
    if cfg.workers < 1:
        yield f'workers: {cfg.workers} would answer no request'
    if is_in_memory(environ) and cfg.workers > 1:
        yield f'PLANTS_STORE: memory: needs one worker, not {cfg.workers}'
    if any(isinstance(each, tuple) and each[1] > 65535 for each in cfg.address):
        yield 'bind: a port is at most 65535'
    if cfg.worker_tmp_dir and not os.path.isdir(cfg.worker_tmp_dir):
        yield f'worker_tmp_dir: {cfg.worker_tmp_dir} is not a directory'
    if cfg.is_ssl:
        try:
            with as_user(cfg):
                ssl_context(cfg)
        except OSError as ex:
            yield f'certfile, keyfile: {ex.strerror or ex}'


def faults(ex: BaseException, printed: str = '') -> list[str]:
    """Return what was wrong, without a traceback: a line of ours for each fault."""
    if lines := [line.strip() for line in printed.splitlines() if line.strip()]:
        where = [line for line in lines if line.startswith('File ')][-1:]
        return [': '.join(dict.fromkeys([lines[0], *where, lines[-1]]))]
    lines = str(ex).splitlines() or [type(ex).__name__]
    return lines if isinstance(ex, ValueError | OSError) else lines[:1]


def end(ex: BaseException) -> NoReturn:
    """End a start with a line for each fault."""
    for fault in faults(ex):
        log.critical('%s', fault)
    sys.exit(1)


def at_exit(function: Callable[[], object]) -> None:
    """Call a function when this process ends, however a start fails; no worker does."""
    pid = os.getpid()
    atexit.register(lambda: os.getpid() == pid and function())


def _share_counters(cfg: Config) -> None:
    """Make the directory of the metrics before their package is imported.

    At its import the package chooses the mode for several processes.
    """
    if not counters:
        directory = tempfile.mkdtemp(prefix='plants-', dir=cfg.worker_tmp_dir)
        at_exit(lambda: shutil.rmtree(directory, ignore_errors=True))
        counters.append(directory)
        os.chown(directory, cfg.uid, cfg.gid)
        os.environ['PROMETHEUS_MULTIPROC_DIR'] = directory


@contextmanager
def as_user(cfg: Config) -> Iterator[None]:
    """Act as the user that serves (``--user``)."""
    user, group = os.geteuid(), os.getegid()
    try:
        os.setegid(cfg.gid)
        os.seteuid(cfg.uid)
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)


def load(service: Service, cfg: Config) -> None:
    """Make the store if it is missing, and read it, however long that takes."""
    with as_user(cfg):
        try:
            service.store.load()
        except StoreUnavailable:  # perhaps it is missing
            with open_store(service.settings.store, create=True) as made:
                made.ping()
            service.store.load()
    path = getattr(service.store, 'path', None)
    if path is not None and (kind := file_system(path)) in SHORT_LIVED:
        log.warning('%s: it is on %s, and may end with this container', path, kind)
