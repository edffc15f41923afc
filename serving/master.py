"""What the master does otherwise than gunicorn's: each method has the reason.

gunicorn looks its methods up on its object at each call, so no subclass is needed.
"""

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


class Master:
    """Has its public methods called in place of those of gunicorn's master, the server.

    ``make`` returns the application of a configuration and of an environment, beside
    the one that is served.
    """

    def __init__(self, server: Any, make: Callable[..., Any]) -> None:
        self._server, self._make = server, make
        hears = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # not after ``nohup``
        self._terminals = [number for number in range(3) if hears and os.isatty(number)]
        self._is_asked = self._is_making = False
        self._newest_old = 0  # age of the last worker that a reload replaces
        self._next_start = self._looked = self._patient = 0.0
        for name in vars(Master):
            if not name.startswith('_'):
                setattr(server, name, getattr(self, name))

    def signal(self, number: int, frame: object) -> None:
        """Queue a signal; one to stop also interrupts a reload, which may take long."""
        if number in ENDING and os.getpid() != self._server.pid:
            os._exit(0)  # a worker that has no handlers of its own yet
        Arbiter.signal(self._server, number, frame)
        if self._is_making and number in ENDING:
            raise KeyboardInterrupt('the server is to stop')

    def handle_hup(self) -> None:
        """Have a reload made after the other signals: several are one, a stop none."""
        if self._terminals and not any(map(os.isatty, self._terminals)):
            raise StopIteration  # it was closed: end as gunicorn's handler of SIGTERM
        self._is_asked = True

    def manage_workers(self) -> None:
        """Start the workers that are missing; end the oldest as enough others are up.

        gunicorn ends all of them if a fork fails, or if one ends with the exit code 3
        or 4 because it cannot boot. Here those that are well go on.
        """
        if self._is_asked:
            self._is_asked = False
            self._reload()
        server, now = self._server, time.monotonic()
        server.reap_workers()
        workers = [each for each in server.WORKERS.values() if each.alive]
        old = [each for each in workers if each.age <= self._newest_old]
        # Before the first heartbeat it is the time of day, which is far greater.
        up = [each for each in workers if each.tmp.last_update() <= now]
        if up:  # only a start may fail; the system keeps one byte of an exit code
            server.WORKER_BOOT_ERROR, server.APP_LOAD_ERROR = 256 + 3, 256 + 4
        if self._newest_old and not old:
            self._newest_old = 0
            server.cfg.when_ready(server)
        missing = server.num_workers + len(old) - len(workers)
        if missing > 0 and now >= self._next_start:
            self._next_start = now + PAUSE
            what = 'a worker cannot start, which is tried again'
            while missing and self._starts(server.spawn_worker, what):
                missing -= 1
        for each in workers:
            if sum(other.age > each.age for other in up) >= server.num_workers:
                each.alive = False  # a second signal would end what it does at exit
                server.kill_worker(each.pid, signal.SIGTERM)
        if missing or old or up != workers:  # look again soon
            time.sleep(0.05)
            server.wakeup()

    def reexec(self) -> None:
        """Start an upgrade (SIGUSR2)."""
        self._starts(partial(Arbiter.reexec, self._server), 'SIGUSR2: no new server')

    def _starts(self, start: Callable[[], object], what: str) -> bool:
        """Return whether a process could be started; if not, nothing ends."""
        try:
            start()
        except Exception as ex:
            log.error('%s: %s', what, ex)
            if os.getpid() != self._server.pid:  # it would be a second master
                os._exit(1)
            return False
        return True

    def murder_workers(self) -> None:
        """After a pause of this process wait: its workers were paused as well."""
        now = time.monotonic()
        if now > self._looked + LATE:
            self._patient = now + LATE
        self._looked = now
        if now >= self._patient:
            Arbiter.murder_workers(self._server)

    def _reload(self) -> None:
        """Make all that is new, then assign it: a failure leaves what there was.

        gunicorn's reload cannot be refused, and hears no signal until all old workers
        have ended.
        """
        server, old, printed = self._server, self._server.cfg, io.StringIO()
        try:
            self._is_making = True
            with redirect_stderr(printed):
                cfg = WSGIApplication().cfg
            for name in FIXED:
                if getattr(cfg, name) != getattr(old, name):
                    raise ValueError(f'{name}: another one needs a restart')
            cfg.env_orig = old.env_orig
            # Without the variables of the old raw_env.
            environ = {k: v for k, v in os.environ.items() if k not in old.env}
            environ |= {k: v for k, v in old.env_orig.items() if k in old.env}
            app = self._make(cfg, environ | cfg.env, server.app.callable)
            if (pid := os.fork()) == 0:  # a trial: there may be no process left
                os._exit(0)
            os.waitpid(pid, 0)
            cfg.on_reload(server)
        except (Exception, SystemExit, KeyboardInterrupt) as ex:
            with suppress(OSError):
                os.chdir(old.chdir)  # all that gunicorn has changed
            said = printed.getvalue() if isinstance(ex, SystemExit) else str(ex)
            words = re.sub(r'(?s)\[?Traceback.*\n(?=\w)', '', said).split()
            log.error('Not reloaded, and nothing has changed: %s', ' '.join(words))
            return
        finally:
            self._is_making = False
        for name in old.env:
            os.environ.pop(name, None)
        os.environ.update(environ)
        server.app.cfg, server.app.callable = cfg, app
        server.setup(server.app)
        self._newest_old = server.worker_age
