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
from typing import Any

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.arbiter import Arbiter

log = logging.getLogger('plants')

ENDING = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT
FIXED = 'bind', 'reuse_port', 'user', 'group', 'pidfile', 'worker_class'  # in reloads
PAUSE = 1.0  # seconds before a start that has failed is tried again
STEADY = 0.1  # seconds between heartbeats of a worker that is up


class Master:
    """Has its public methods called in place of those of gunicorn's master, the server.

    ``make`` returns the application of a configuration and of an environment, beside
    the one that is served; ``say`` logs what is served.
    """

    def __init__(
        self, server: Any, make: Callable[..., Any], say: Callable[[str], None]
    ) -> None:
        self._server, self._make, self._say = server, make, say
        hears = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # not after ``nohup``
        self._terminals = [number for number in range(3) if hears and os.isatty(number)]
        self._is_asked = self._is_making = self._is_reloading = False
        self._oldest = 0  # the age of the last worker that a reload replaces
        self._booting: set[Any] = set()
        self._retry = 0.0  # when workers may be started
        self._looked = self._patient = time.monotonic()
        for name in vars(Master):
            if not name.startswith('_'):
                setattr(server, name, getattr(self, name))

    def signal(self, number: int, frame: object) -> None:
        """Queue a signal; one to stop also interrupts a reload, which may take long."""
        Arbiter.signal(self._server, number, frame)
        if self._is_making and number in ENDING:
            raise KeyboardInterrupt('the server is to stop')

    def handle_hup(self) -> None:
        """Have a reload made after the other signals: several are one, a stop none."""
        if self._terminals and not any(map(os.isatty, self._terminals)):
            raise StopIteration  # it was closed: end as gunicorn's handler of SIGTERM
        self._is_asked = True

    def reap_workers(self) -> None:
        """Forget workers that have ended; once one has started, none ends the server.

        gunicorn ends for an exit code of 3 or 4. The system keeps one byte of a code.
        """
        server, now = self._server, time.monotonic()
        for each in server.WORKERS.values():
            # Before the first heartbeat it is the time of day, which is far greater.
            if (beat := each.tmp.last_update()) <= now:
                server.WORKER_BOOT_ERROR, server.APP_LOAD_ERROR = 256 + 3, 256 + 4
                first = vars(each).setdefault('first_beat', beat)
                each.booted = beat > first + STEADY
        Arbiter.reap_workers(server)

    def manage_workers(self) -> None:
        """Start the workers that are missing; end old ones as new ones are up.

        gunicorn ends them all if a fork fails, or if a new one cannot boot. Here they
        go on, and the start is tried again after a pause.
        """
        if self._is_asked:
            self._is_asked = False
            self._reload()
        server, now = self._server, time.monotonic()
        server.reap_workers()
        workers = sorted(server.WORKERS.values(), key=lambda each: each.age)
        old = [each for each in workers if each.age <= self._oldest]
        new = workers[len(old) :]
        up = [each for each in new if each.booted]
        if self._is_reloading and len(up) >= server.num_workers:
            self._is_reloading = False
            self._say('reloaded')
        if not all(each.booted for each in self._booting - set(workers)):
            self._retry = now + PAUSE
        try:
            for _ in range(server.num_workers - len(new) if now >= self._retry else 0):
                server.spawn_worker()
        except Exception as ex:
            self._end_child(ex)
            self._retry = now + PAUSE
            log.error('a worker cannot start, which is tried again: %s', ex)
        spare = max(0, len(old) + len(up) - server.num_workers)
        old.sort(key=lambda each: each.booted)  # and by age, as before
        for each in old[:spare] + new[: max(0, len(new) - server.num_workers)]:
            if each.alive:  # only once: a second signal would end what it does at exit
                each.alive = False
                server.kill_worker(each.pid, signal.SIGTERM)
        self._booting = {each for each in server.WORKERS.values() if not each.booted}
        if self._booting:  # look again soon
            time.sleep(0.05)
            server.wakeup()

    def murder_workers(self) -> None:
        """After a pause of this process wait: its workers were paused as well."""
        now = time.monotonic()
        if now > self._looked + 2 * PAUSE:
            self._patient = now + 2 * PAUSE
        self._looked = now
        if now >= self._patient:
            Arbiter.murder_workers(self._server)

    def _end_child(self, reason: Exception) -> None:
        """End a child in which something failed: it would go on as a second master."""
        if os.getpid() != self._server.pid:
            log.error('a new process ends: %s', reason)
            os._exit(1)

    def _reload(self) -> None:
        """Make all that is new, then assign it: a failure leaves what there was.

        gunicorn's reload cannot be refused, and hears no signal until all old workers
        have ended.
        """
        server, printed = self._server, io.StringIO()
        old = server.cfg
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
        self._oldest, self._is_reloading = server.worker_age, True
