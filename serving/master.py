"""The master: gunicorn's, with the methods that must differ; each has the reason."""

import gc
import io
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from typing import Any

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.arbiter import Arbiter

log = logging.getLogger('plants')

ENDING = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT
FIXED = 'bind', 'reuse_port', 'user', 'group', 'pidfile', 'worker_class'  # in reloads
PAUSE = 0.5  # seconds between two attempts to start workers
LATE = 2.0  # seconds between two looks at the workers, if this process was paused


class Master(Arbiter):  # type: ignore[misc]
    """gunicorn's master, which the hook ``on_starting`` makes one of this class.

    ``make`` returns the application of a configuration and of an environment, beside
    the one that is served.
    """

    make: Callable[..., Any]
    terminals: list[int]  # descriptors of the one in which the server was started
    is_asked = is_making = False  # whether a reload is asked for, or goes on
    newest_old = 0  # age of the last worker that a reload replaces
    next_start = 0.0
    looked: float  # when it has last looked for workers that hang

    def begin(self, make: Callable[..., Any]) -> None:
        """Note how the server was started."""
        self.make, self.looked = make, time.monotonic()
        hears = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # not after ``nohup``
        self.terminals = [number for number in range(3) if hears and os.isatty(number)]

    def signal(self, sig: int, frame: object) -> None:
        """Queue a signal; one to stop also interrupts a reload, which may take long."""
        if sig in ENDING and os.getpid() != self.pid:
            os._exit(0)  # a worker that has no handlers of its own yet
        super().signal(sig, frame)
        if self.is_making and sig in ENDING:
            raise KeyboardInterrupt('the server is to stop')

    def handle_hup(self) -> None:
        """Have a reload made after the other signals: several are one, a stop none."""
        if self.terminals and not any(map(os.isatty, self.terminals)):
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
        self.reap_workers()
        now = time.monotonic()
        workers = [each for each in self.WORKERS.values() if each.alive]
        old = [each for each in workers if each.age <= self.newest_old]
        # Before the first heartbeat it is the time of day, which is far greater.
        up = [each for each in workers if each.tmp.last_update() <= now]
        if up:  # only a start may fail; the system keeps one byte of an exit code
            self.WORKER_BOOT_ERROR, self.APP_LOAD_ERROR = 256 + 3, 256 + 4
        if self.newest_old and not old:
            self.newest_old = 0
            self._succeeds(partial(self.cfg.when_ready, self), 'when_ready')
        missing = self.num_workers + len(old) - len(workers)
        if missing > 0 and now >= self.next_start:
            self.next_start = now + PAUSE
            what = 'a worker cannot start, which is tried again'
            while missing and self._succeeds(self.spawn_worker, what):
                missing -= 1
        for each in workers:
            if sum(other.age > each.age for other in up) >= self.num_workers:
                each.alive = False  # a second signal would end what it does at exit
                self.kill_worker(each.pid, signal.SIGTERM)
        if missing or old or up != workers:  # look again soon
            time.sleep(0.05)
            self.wakeup()

    def reexec(self) -> None:
        """Start an upgrade (SIGUSR2)."""
        self._succeeds(super().reexec, 'SIGUSR2: no new server')

    def reap_workers(self) -> None:
        """Forget the workers that have ended; the operator's hook may fail."""
        self._succeeds(super().reap_workers, 'child_exit')

    def _succeeds(self, call: Callable[[], object], what: str) -> bool:
        """Return whether a fork or a hook of the operator has succeeded."""
        try:
            call()
        except Exception as ex:
            log.error('%s: %s', what, ex)
            if os.getpid() != self.pid:  # a fork: it would be a second master
                os._exit(1)
            return False
        return True

    def murder_workers(self) -> None:
        """After a pause of this process wait: its workers were paused as well."""
        while time.monotonic() > self.looked + LATE:  # perhaps it is paused again
            self.looked = time.monotonic()
            time.sleep(1.5)
        self.looked = time.monotonic()
        super().murder_workers()

    def reload(self) -> None:
        """Make all that is new, then assign it: a failure leaves what there was.

        gunicorn's reload cannot be refused, and hears no signal until all old workers
        have ended.
        """
        old, environ, printed = self.cfg, os.environ.copy(), io.StringIO()
        try:
            self.is_making = True
            for name in old.env:
                os.environ.pop(name, None)
            os.environ |= {k: v for k, v in old.env_orig.items() if k in old.env}
            with redirect_stderr(printed):
                cfg = WSGIApplication().cfg
            for name in FIXED:
                if getattr(cfg, name) != getattr(old, name):
                    raise ValueError(f'{name}: another one needs a restart')
            app = self.make(cfg, os.environ | cfg.env, self.app.callable)
            if (pid := os.fork()) == 0:  # a trial: there may be no process left
                os._exit(0)
            os.waitpid(pid, 0)
            cfg.on_reload(self)
        except (Exception, SystemExit, KeyboardInterrupt) as ex:
            with suppress(OSError):
                os.chdir(old.chdir)
            os.environ.clear()
            os.environ |= environ
            said = printed.getvalue() if isinstance(ex, SystemExit) else str(ex)
            words = re.sub(r'(?s)\[?Traceback.*\n(?=\w)', '', said).split()
            log.error('Not reloaded, and nothing has changed: %s', ' '.join(words))
            return
        finally:
            self.is_making = False
        self.app.cfg, self.app.callable = cfg, app
        self._succeeds(partial(self.setup, self.app), 'nworkers_changed')
        self.newest_old = self.worker_age
