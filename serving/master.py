"""The master: gunicorn's, with a reload that happens whole or not at all.

On SIGHUP the master runs ``gunicorn --check-config`` in another process, since a check
may take long or hang. If the check passes, the master reads everything again, and
starts new workers beside the old ones. When all new workers serve, it stops the old
ones. If any step before that fails, the master undoes all steps.

Every module of the service is imported again, except this one, which imports none of
the others. Python frees the old ones unless something that stays refers to them:
register none of their classes and functions (``atexit``, ``copyreg``).
"""

import importlib
import io
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from gunicorn.app import base
from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer

# What is imported again; __config__ is gunicorn.conf.py.
MODULES = re.compile(r'(app|schemas|serving(?!\.master)|store|web|__config__)(\.|$)')
# By the age of a worker: its connections plus one, or 0 if there is none. All processes
# share this memory, also old and new workers in a reload.
connection_counts = memoryview(mmap.mmap(-1, 8 * 256)).cast('q')
# Settings that a reload cannot change, or could not restore.
FIXED = ('wsgi_app', 'bind', 'reuse_port', 'user', 'group', 'pidfile', 'capture_output')
PASSED = 'the plant store would start'  # printed by a check that passes
CHECK_SECONDS = 300  # how long a check may take
BOOT_SECONDS = 60  # how long new workers may take until they serve


def install(first: Callable[[WSGIApplication], None]) -> None:
    """Have gunicorn run ``Master``, and call a function before anything else."""
    # Not as a hook: gunicorn's check calls none, and --daemon leaves the terminal.
    run = WSGIApplication.run

    def run_after(application: WSGIApplication) -> None:
        first(application)
        run(application)

    if base.Arbiter is not Master:  # a reload reads the configuration again
        base.Arbiter = Master
        WSGIApplication.run = run_after


class Master(Arbiter):  # type: ignore[misc]
    """gunicorn's master."""

    app: Any
    cfg: Any
    log: Any
    made_token: str | None = None  # because none was configured
    counters: Path | None = None  # the directory in which workers share their metrics
    store: Any = None  # of the next workers; None if the application is not ours
    _check: subprocess.Popen[bytes] | None = None
    _check_again = False

    def __init__(self, application: WSGIApplication) -> None:
        super().__init__(application)
        # gunicorn takes sys.argv, where `python -m gunicorn` is a path in its package:
        # `import http` would find gunicorn's own.
        self.START_CTX['args'] = [sys.executable, *sys.orig_argv[1:]]

    @property
    def has_twin(self) -> bool:
        """Whether the other master of an upgrade (SIGUSR2) runs, too."""
        return bool(self.reexec_pid or self.master_pid)

    def handle_hup(self) -> None:
        if self.store is None:
            super().handle_hup()
            return
        if self._check is not None:
            self._check_again = True  # the running check may have read older files
            return
        try:
            where = self.cfg.worker_tmp_dir  # in memory, if the system has such a place
            self._printed = TemporaryFile('w+', errors='replace', dir=where)  # noqa: SIM115
            self._check = subprocess.Popen(
                [*self.START_CTX['args'], '--check-config'],
                cwd=self.START_CTX['cwd'],
                # GUNICORN_FD means, as in an upgrade: the addresses are ours already.
                env=self.cfg.env_orig | {'GUNICORN_FD': ''},
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(signal.alarm, CHECK_SECONDS),
            )
        except OSError as ex:
            self._refuse(str(ex))

    def handle_chld(self) -> None:
        super().handle_chld()
        if self._check is None or self._check.poll() is None:
            return
        self._check = None
        with self._printed:
            self._printed.seek(0)
            printed = self._printed.read()
        # NOTE: not the exit code, which is lost if gunicorn has reaped the process.
        if PASSED in printed:
            self._replace()
        else:
            late = f'the check was killed, or took longer than {CHECK_SECONDS} s'
            self._refuse(_sentence(printed) or late)
        if self._check_again:
            self._check_again = False
            self.handle_hup()

    handle_cld = handle_chld

    def _refuse(self, reason: str) -> None:
        self.log.error('Not reloaded, the server goes on as before: %s', reason)

    def _replace(self) -> None:
        """Load everything again and start new workers, or change nothing."""
        # Shallow: cfg and app are replaced, but WORKERS stays the same dictionary,
        # because an old worker may end meanwhile.
        attributes, environ = vars(self).copy(), dict(os.environ)
        modules = {name: sys.modules[name] for name in _module_names()}
        old = set(self.WORKERS)
        try:
            self._load()
            self._start_workers(old)
        except BaseException as ex:  # also SystemExit, of a hook
            if os.getpid() != self.pid:
                raise  # the end of a worker that was forked in _start_workers
            # First restore everything: the new hooks may fail again.
            _forget_modules()
            sys.modules.update(modules)
            self.__dict__.update(attributes)
            os.environ.clear()
            os.environ.update(environ)
            with suppress(OSError):  # the directory may be gone
                os.chdir(self.cfg.chdir)
            with suppress(Exception):  # the directory of a log file, too
                self.log.setup(self.cfg)
            self._kill_workers_but(old)
            is_sentence = isinstance(ex, ValueError | OSError | RuntimeError)
            self._refuse(str(ex) if is_sentence else f'{type(ex).__name__}: {ex}')
        else:
            self._stats['reloads'] += 1
            self.log.info('Reloaded: the new workers serve')
            self.manage_workers()  # stops the oldest that are too many

    def _load(self) -> None:
        """Read the configuration, import the code and build the application."""
        if self.has_twin:
            raise ValueError('two masters run since SIGUSR2: end one of them first')
        _forget_modules()
        importlib.invalidate_caches()
        os.environ.clear()
        os.environ.update(self.cfg.env_orig)  # without what the configuration added
        printed = io.StringIO()
        try:
            with redirect_stderr(printed):
                app = WSGIApplication(self.app.usage, self.app.prog)
        except SystemExit as ex:
            raise ValueError(_sentence(printed.getvalue() or str(ex))) from ex
        for name in FIXED:
            if getattr(app.cfg, name) != getattr(self.cfg, name):
                raise ValueError(f'{name}: a change needs a restart')
        self.app, self.cfg = app, app.cfg
        self.cfg.on_reload(self)
        self.log = None  # setup() makes one, of the new code
        self.setup(app)

    def _start_workers(self, old: set[int]) -> None:
        """Start new workers beside the old ones; return when all of them serve."""
        deadline = time.monotonic() + BOOT_SECONDS
        for _ in range(self.num_workers):
            self.spawn_worker()
        while True:
            new = [worker for pid, worker in self.WORKERS.items() if pid not in old]
            if len(new) < self.num_workers or time.monotonic() > deadline:
                raise RuntimeError('a new worker does not serve; the log has more')
            # Until its first heartbeat a worker's file has the time of day: far above.
            if all(worker.tmp.last_update() <= time.monotonic() for worker in new):
                return
            time.sleep(0.01)
            with suppress(HaltServer):  # one could not start
                self.reap_workers()

    def _kill_workers_but(self, old: set[int]) -> None:
        """Kill the workers that a failed reload has started; return when they ended."""
        while new := self.WORKERS.keys() - old:
            for pid in new:
                self.kill_worker(pid, signal.SIGKILL)
            time.sleep(0.01)
            with suppress(HaltServer):
                self.reap_workers()

    def signal(self, number: int, frame: object) -> None:
        # A new worker that has no handlers yet would only queue a signal to stop. Not
        # sys.exit(): Python ignores exceptions in a callback that runs at a fork.
        stops = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT
        if number in stops and os.getpid() != self.pid:
            os._exit(0)
        super().signal(number, frame)


def _module_names() -> list[str]:
    """Return the names of the modules that a reload imports again."""
    return [name for name in sys.modules if MODULES.match(name)]


def _forget_modules() -> None:
    for name in _module_names():
        del sys.modules[name]


def _sentence(printed: str) -> str:
    """Return the last printed line, and the place or the setting that it is about."""
    last = printed.rstrip().rpartition('\n')[2].removeprefix('Error: ')
    if places := re.findall(r'  File "(.+)", line (\d+)', printed):
        return '{}, line {}: {}'.format(*places[-1], last)
    if settings := re.findall('Invalid value for .+', printed):
        return f'{settings[-1]}: {last}'
    return last
