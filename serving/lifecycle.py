"""The life of a server: hooks of gunicorn, in the order in which a server meets them.

The master builds the application and loads the store once, before it makes workers. A
reload (SIGHUP) does both again, beside what runs; only if all of it has worked does
gunicorn start new workers.
"""

import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gunicorn.app.wsgiapp import WSGIApplication

from serving import service
from store import StoreError, masked
from web.settings import is_in_memory
from web.tokens import show_token

log = logging.getLogger('plants')

# Attributes and names of settings that a reload cannot change.
FIXED = {'address': 'bind', 'reuse_port': 'reuse_port', 'uid': 'user', 'gid': 'group'}
FIXED |= {'pidfile': 'pidfile'}
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}


def on_starting(server: Any) -> None:
    """Load the store, as the user that serves."""
    # Until gunicorn has handlers: the pid file is removed, and process 1 ends, too.
    for number in ENDING:
        signal.signal(number, lambda *_: sys.exit(0))
    mask = partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING)
    unmask = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING)
    os.register_at_fork(
        before=mask, after_in_parent=unmask, after_in_child=partial(_end_early, unmask)
    )
    has_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    server.handle_hup = partial(_hang_up, server, server.handle_hup, has_terminal)
    service.at_exit(lambda: server.pidfile and server.pidfile.unlink())
    try:
        service.load(service.services[0], server.cfg)
    except (StoreError, OSError) as ex:
        service.end(ex)


def when_ready(server: Any) -> None:
    """Show the token that was made, and log what is served, and where."""
    addresses = [str(each) for each in server.LISTENERS or server.cfg.bind]
    url = addresses[0].replace('0.0.0.0', '127.0.0.1')
    settings = service.services[0].settings
    if settings.tokens is None:
        show_token(service.made_tokens[0], url)
    facts = {
        'address': ', '.join(addresses),
        'store': masked(settings.store),
        'tokens': len(settings.tokens or ()) or 'one, made by this start',
        'workers': server.cfg.workers,
        'page': f'{url}/docs',
    }
    lines = ['%(message)s', *(f'    {name:9}%({name})s' for name in facts)]
    log.info('\n'.join(lines), {'message': 'the plant store is ready', **facts})


def nworkers_changed(server: Any, new: int, old: int | None) -> None:
    """Keep one worker of a store in memory: a second one has plants of its own."""
    if old is not None and new > 1 and is_in_memory(os.environ | server.cfg.env):
        server.log.error('PLANTS_STORE: memory: needs one worker, not %d', new)
        server.num_workers = 1


def pre_fork(server: Any, worker: Any) -> None:
    """Read what was appended to the store since, if nobody has to wait for that."""
    try:
        service.services[0].store.load(wait=False)
    except Exception as ex:
        log.warning('the store was not read before a fork: %s', ex)


def post_worker_init(worker: Any) -> None:
    """Ignore SIGHUP, which also the workers get when a terminal is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def worker_exit(server: Any, worker: Any) -> None:
    """Close the store in a worker that ends, and write its last lines."""
    if os.getpid() == worker.pid:
        service.services[0].store.close()
        server.log.buffer.flush()


def pre_exec(server: Any) -> None:
    """Correct the command of an upgrade (SIGUSR2) after ``python -m gunicorn``."""
    # The path is in gunicorn's package, whose modules would hide others.
    if Path(server.START_CTX['args'][1]).name == '__main__.py':
        server.START_CTX['args'][1:2] = ['-m', 'gunicorn']


def _end_early(unmask: Callable[[], object]) -> None:
    """Let a worker end that has no handlers yet.

    It has those of the master, which queue a signal for a loop that it does not run, so
    the server would wait for ``graceful_timeout``.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    unmask()


def _has_terminal() -> bool:
    with suppress(OSError):
        os.close(os.open('/dev/tty', os.O_RDWR | os.O_NOCTTY))
        return True
    return False


def _hang_up(server: Any, reload: Callable[[], None], had_terminal: bool) -> None:
    """Handle SIGHUP: reload, or end the server if its terminal was closed."""
    if had_terminal and not _has_terminal():
        raise StopIteration  # as gunicorn's handler of SIGTERM
    app, old, served = server.app, server.cfg, service.services.copy()
    before = [(each, vars(each).copy()) for each in (server, app)]
    environ, directory = os.environ.copy(), os.getcwd()
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            cfg = WSGIApplication().cfg
        cfg.env_orig = old.env_orig
        for name, setting in FIXED.items():
            if getattr(cfg, name) != getattr(old, name):
                raise ValueError(f'{setting}: another one needs a restart')
        theirs = {name: environ[name] for name in environ.keys() - old.env.keys()}
        new = service.build_from(cfg, old.env_orig | theirs | cfg.env)
        service.load(new, cfg)
        server.log.setup(cfg)  # gunicorn would go on without
        # All of it has worked: gunicorn reads nothing again, and starts workers.
        service.services[:] = [new]
        app.cfg, app.callable, app.reload = cfg, new.app, lambda: None
        reload()
    except (Exception, SystemExit) as ex:
        if os.getpid() != server.pid:  # the end of a worker that was forked here
            raise
        service.services[:] = served
        for changed, values in before:
            vars(changed).update(values)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(directory)
        server.log.setup(old)
        for fault in service.faults(ex, messages.getvalue()):
            log.error('Not reloaded, and nothing has changed: %s', fault)
