"""The life of a server: start, hooks, upgrade, end.

The master opens the store once before it makes workers: a damaged file stops the start,
and a missing index is built once. Later the master waits for no store and no lock.

It builds the application once: a worker that starts while files are half edited has the
same schemas, tokens, code and plant file as the others. A reload builds it again.
"""

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.config import Config
from gunicorn.workers.base import Worker

from app import create_app
from serving.check import as_user, check
from serving.master import PASSED, Master, connection_counts
from serving.scheduler import GeventScheduler
from serving.worker import PlantsWorker
from store import THREADS, StoreError, masked, open_store
from web.settings import Settings, is_in_memory
from web.tokens import make_token

log = logging.getLogger('plants')

OURS = 'app:app'  # other applications are served as gunicorn does it
COUNTERS_VARIABLE = 'GUNICORN_COUNTERS'  # their directory, for an upgrade


def default_workers() -> int:
    """Return the number of workers: one for each core, or 1 with a store in memory."""
    if is_in_memory(os.environ):
        return 1
    if hasattr(os, 'sched_getaffinity'):  # macOS has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def before_run(application: WSGIApplication) -> None:
    """Check, and open the store once, or end with a sentence and exit code 1."""
    if application.app_uri != OURS:
        return
    cfg = application.cfg
    checks_only = cfg.check_config or cfg.print_config
    is_bound = 'GUNICORN_FD' in os.environ
    try:
        settings = check(cfg, is_bound=is_bound, is_opened_next=not checks_only)
        if not checks_only:
            cfg.logger_class(cfg)  # the store may log its progress
            with as_user(cfg), open_store(settings.store) as store:
                store.load()
    except (ValueError, StoreError, OSError) as ex:
        faults = str(ex).splitlines()
        if not checks_only:
            with suppress(Exception):  # the log may be what is wrong
                logger = cfg.logger_class(cfg)
                for fault in faults:
                    logger.critical('%s', fault)
                if cfg.errorlog == '-':
                    sys.exit(1)
        # A reload shows the last line of what its check prints.
        sys.exit('Error: ' + ('; ' if is_bound else '\nError: ').join(faults))
    if cfg.print_config:
        print(cfg)
    if checks_only:
        members = _summary(cfg, settings, 'none configured: a start makes one')
        print(_template(members) % {'message': PASSED, **members})
        sys.exit()


def when_ready(server: Master) -> None:
    """Build the application of the workers; log once what is served, and where."""
    if server.app.app_uri != OURS:
        return
    addresses = [str(listener) for listener in server.LISTENERS]
    if not addresses:  # each worker binds its own (reuse_port)
        scheme = 'https' if server.cfg.is_ssl else 'http'
        addresses = [x if 'unix:' in x else f'{scheme}://{x}' for x in server.cfg.bind]
    url = next((address for address in addresses if address.startswith('http')), '')
    url = url.replace('0.0.0.0', '127.0.0.1')
    settings = Settings.from_environ(os.environ)
    if settings.tokens is None:
        directory = server.cfg.worker_tmp_dir
        server.made_token = make_token(url or 'http://HOST:PORT', directory)
    _serve(server, settings)
    members = _summary(server.cfg, settings, 'one, made by this start')
    members = {'address': ', '.join(addresses), **members}
    if url:
        members['page'] = f'{url}/docs'
    log.info(_template(members), {'message': 'the plant store is ready', **members})


def worker_exit(server: Master, worker: Worker) -> None:
    """Close the store in a worker that ends."""
    if server.store is not None and os.getpid() == worker.pid:
        server.store.close()


def child_exit(server: Master, worker: Worker) -> None:
    """Set the connection count of a worker that has ended to zero."""
    connection_counts[worker.age % len(connection_counts)] = 0


def nworkers_changed(server: Master, new: int, old: int | None) -> None:
    """Allow only one worker with a store in memory, also after SIGTTIN."""
    if server.store is not None and is_in_memory(os.environ) and new > 1:
        server.log.error('PLANTS_STORE: memory: needs one worker, not %d', new)
        server.num_workers = 1


def on_reload(server: Master) -> None:
    """Check and build again. If this raises, the master goes on as before."""
    if server.store is None:
        return
    settings = check(server.cfg, is_bound=True, is_opened_next=True)
    with as_user(server.cfg):
        open_store(settings.store).close()
    _serve(server, settings)


def pre_exec(server: Master) -> None:
    """Give the master of an upgrade (SIGUSR2) our token and counters."""
    if server.made_token is not None:
        server.cfg.env_orig['PLANTS_TOKENS'] = server.made_token
    if server.counters is not None:
        server.cfg.env_orig[COUNTERS_VARIABLE] = str(server.counters)


def on_exit(server: Master) -> None:
    """Remove the counters, unless the other master of an upgrade still uses them."""
    if server.counters is not None and not server.has_twin:
        shutil.rmtree(server.counters, ignore_errors=True)


def _serve(server: Master, settings: Settings) -> None:
    """Build the application of all workers that start from now on."""
    options = settings.app_options()
    if settings.metrics:
        options['metrics'] = server.counters = server.counters or _counters(server.cfg)
    is_gevent = issubclass(server.cfg.worker_class, PlantsWorker)
    scheduler = GeventScheduler() if is_gevent else THREADS
    server.store = open_store(settings.store, create=False, scheduler=scheduler)
    tokens = settings.tokens or server.made_token or ()
    server.app.callable = create_app(server.store, tokens=tokens, **options)


def _counters(cfg: Config) -> Path:
    """Return the directory of the counters; an upgrade takes over the old one."""
    # Take over only the directory of our parent, because on_exit removes it.
    inherited = Path(os.environ.get(COUNTERS_VARIABLE, ''))
    is_upgrade = os.environ.get('GUNICORN_PID') == str(os.getppid())
    if is_upgrade and inherited.name.startswith('plants-counters-'):
        return inherited
    made = Path(tempfile.mkdtemp(prefix='plants-counters-', dir=cfg.worker_tmp_dir))
    os.chown(made, cfg.uid, cfg.gid)
    return made


def _summary(cfg: Config, settings: Settings, no_tokens: str) -> dict[str, object]:
    """Return the facts that a check prints and a start logs, by label."""
    tokens = len(settings.tokens or ()) or no_tokens
    store = masked(settings.store)
    if store.startswith('jsonl:'):
        store = f'jsonl:{Path(store[6:]).absolute()}'
    return {'store': store, 'tokens': tokens, 'workers': cfg.workers}


def _template(members: Mapping[str, object]) -> str:
    """Return the template of a message with a line for each member."""
    return '\n'.join(['%(message)s', *(f'    {name:9}%({name})s' for name in members)])
