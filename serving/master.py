"""The master: gunicorn's, with the methods that must differ, and hooks of gunicorn."""

import atexit
import gc
import io
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial, partialmethod
from typing import Any

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.arbiter import Arbiter

from serving.lifecycle import ENDING, ONE_WORKER, make
from serving.log import PlantsLogger
from store import masked
from web.tokens import show_token

log = logging.getLogger('plants')

FIXED = ['bind', 'reuse_port', 'user', 'group', 'pidfile', 'worker_class']  # in reloads
FIXED += ['backlog', 'daemon', 'initgroups', 'preload_app', 'umask', 'wsgi_app']
LATE = 2.0  # seconds between two looks at the workers, if this process was paused


class Master(Arbiter):  # type: ignore[misc]
    """gunicorn's master, which the hook ``on_starting`` makes one of this class."""

    had_terminal = False  # whether the server was started in one
    is_asked = is_making = False  # whether a reload is asked for, or goes on
    told: Any = None  # the configuration that the log has called ready
    looked: float  # when it has last looked for workers that hang

    def signal(self, sig: int, frame: object) -> None:
        """Queue a signal; one to stop also interrupts a reload, which may take long."""
        if sig in ENDING and os.getpid() != self.pid:
            os._exit(0)  # a worker that has no handlers of its own yet
        super().signal(sig, frame)
        if self.is_making and sig in ENDING:
            raise KeyboardInterrupt('the server is to stop')

    def handle_hup(self) -> None:
        """Have a reload made after the other signals: several are one, a stop none."""
        if self.had_terminal and not any(map(os.isatty, range(3))):
            self.handle_term()  # it was closed
        self.is_asked = True

    def manage_workers(self) -> None:
        """Start the workers that are missing; end the oldest as enough others are up.

        gunicorn ends all of them if a fork fails, or if one ends with the exit code 3
        or 4 because it cannot boot. Here those that are well go on.
        """
        if self.is_asked:
            self.is_asked = False
            self.reload()
            gc.collect()  # what it replaced is in cycles, and may be a gigabyte
        self.reap_workers()  # a hook may have failed at one of several
        workers = [each for each in self.WORKERS.values() if each.alive]
        old = [each for each in workers if each.cfg is not self.cfg]
        # Before the first heartbeat it is the time of day, which is far greater.
        up = [each for each in workers if each.tmp.last_update() <= time.monotonic()]
        if up:  # only a start may fail: no exit code, which is one byte, ends all now
            self.WORKER_BOOT_ERROR, self.APP_LOAD_ERROR = 256 + 3, 256 + 4
        if self.told is not self.cfg and not old and (up or not self.told):
            show_ready(self)
            self.told = self.cfg
        missing = self.num_workers + len(old) - len(workers)
        for _ in range(missing):
            self.spawn_worker()
        for each in workers:
            if sum(other.age > each.age for other in up) >= self.num_workers:
                each.alive = False  # a second signal would end what it does at exit
                self.kill_worker(each.pid, signal.SIGTERM)
        if missing or old or up != workers:
            time.sleep(0.5 if missing else 0.2)  # a new one may end at once
            self.wakeup()

    def _guard(self, call: Callable[..., object], what: str, *args: object) -> None:
        """Call; a fork, or a hook of the operator, that fails ends no other worker."""
        os.umask(umask := os.umask(0o77))  # which a file that fails leaves changed
        try:
            call(self, *args)
        except Exception as ex:
            os.umask(umask)
            log.error('%s: %s', what, ex)
            if os.getpid() != self.pid:  # a fork: it would be a second master
                os._exit(1)

    maybe_promote_master = partialmethod(_guard, Arbiter.maybe_promote_master, '-p')
    reap_workers = partialmethod(_guard, Arbiter.reap_workers, 'child_exit')
    reexec = partialmethod(_guard, Arbiter.reexec, 'SIGUSR2: no new server')
    setup = partialmethod(_guard, Arbiter.setup, 'SIGHUP')
    spawn_worker = partialmethod(_guard, Arbiter.spawn_worker, 'a worker cannot start')

    @Arbiter.num_workers.setter  # type: ignore[untyped-decorator]
    def num_workers(self, number: int) -> None:
        self._guard(Arbiter._set_num_workers, 'nworkers_changed', number)

    def murder_workers(self) -> None:
        """After a pause of this process wait: its workers were paused as well."""
        while time.monotonic() > self.looked + LATE:  # perhaps it is paused again
            self.looked = time.monotonic()
            time.sleep(1.5)
        self.looked = time.monotonic()
        super().murder_workers()

    def reload(self) -> None:
        """Make all that is new, then assign it: a failure leaves what there was.

        gunicorn's cannot be refused, and hears no signal until all old workers ended.
        """
        old, environ, printed = self.cfg, os.environ.copy(), io.StringIO()
        try:
            self.is_making = True
            for name in old.env:  # which gunicorn has set
                os.environ.pop(name, None)
            os.environ |= {k: v for k, v in old.env_orig.items() if k in old.env}
            with redirect_stderr(printed):
                cfg = WSGIApplication().cfg
            for name in FIXED:
                if getattr(cfg, name) != getattr(old, name):
                    raise ValueError(f'{name}: another one needs a restart')
            app = make(cfg, self.app.callable)
            if (pid := os.fork()) == 0:  # a trial: there may be no process left
                os._exit(0)
            os.waitpid(pid, 0)
            cfg.on_reload(self)
        except (Exception, SystemExit, KeyboardInterrupt) as ex:
            with suppress(OSError):
                os.chdir(old.chdir)
            for name in os.environ.keys() - environ.keys():
                del os.environ[name]
            os.environ |= dict(environ.items() - os.environ.items())
            said = printed.getvalue() if isinstance(ex, SystemExit) else str(ex)
            words = re.sub(r'(?s)\[?Traceback.*\n(?=\w)', '', said).split()
            log.error('Not reloaded, and nothing has changed: %s', ' '.join(words))
            return
        finally:
            self.is_making = False
        self.app.cfg, self.app.callable = cfg, app
        self.setup(self.app)


def on_starting(server: Any) -> None:
    """Prepare for the signals that come, and for a start that fails."""
    if not hasattr(server.app.callable, 'store'):
        log.critical('leave wsgi_app and preload_app as gunicorn.conf.py has them')
        sys.exit(1)
    # In a worker, too; the last first. ``logging`` closes files before it flushes ours.
    atexit.register(PlantsLogger.buffer.flush)
    atexit.register(lambda: server.app.callable.store.close())
    server.__class__, server.looked = Master, time.monotonic()
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not after ``nohup``
        server.had_terminal = any(map(os.isatty, range(3)))
    if server.app.callable.settings.store == 'memory:':
        server.handle_ttin = server.handle_usr2 = partial(log.error, ONE_WORKER)
    # For an upgrade (SIGUSR2): gunicorn knows neither ``-m`` nor options of Python.
    server.START_CTX['args'] = sys.orig_argv


def show_ready(server: Any) -> None:
    """Log what is served after a start or reload, and where, as curl takes it."""
    settings = server.app.callable.settings
    listening = server.LISTENERS or [f'http://{server.cfg.bind[0]}']  # --reuse-port
    url = re.sub('unix:(.*)', r"--unix-socket '\1' http://localhost", str(listening[0]))
    url = re.sub(r'//(0\.0\.0\.0|\[::\]):', '//127.0.0.1:', url)
    url = f'{url}/{os.environ.get("SCRIPT_NAME", "").strip("/")}'.rstrip('/')
    if server.cfg.is_ssl:  # gunicorn writes http for IPv6
        url = url.replace('http:', 'https:')
    if settings.tokens is None and not server.told:
        show_token(url)
    if server.systemd and server.cfg.bind != ['127.0.0.1:8000']:  # or PORT is set
        log.warning('bind: it has no effect beside the sockets of systemd')
    what, store = 'reloaded' if server.told else 'started', masked(settings.store)
    log.info('%s: the store %s is ready; to try it: %s/docs', what, store, url)


def pre_fork(server: Any, worker: Any) -> None:
    """Have the worker inherit the tokens that are valid now, and none from before."""
    # The lowest number that no living worker has; its metrics go by it.
    taken = {0, *(getattr(each, 'number', 0) for each in server.WORKERS.values())}
    worker.number = min({*range(len(taken) + 1)} - taken)
    if tokens := server.app.callable.settings.tokens:
        tokens.refresh()


def post_worker_init(worker: Any) -> None:
    """Ignore what is for the master: a closed terminal, or pkill, signals all."""
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if metrics := worker.app.callable.metrics:
        metrics.number = worker.number
