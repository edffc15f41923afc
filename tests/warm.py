"""Start gunicorn by a fork of a process that has imported its libraries.

These imports take two thirds of the CPU of a start, and the tests start hundreds of
servers. After the fork gunicorn is removed again, and imported as in a new process;
its libraries stay. The service is never imported before the fork. The commands that
people type are started as they are: see ``tests/serving/test_start.py``.

A server that was started so also checks its reloads in a fork of itself, and makes the
new master of an upgrade so.
"""

import atexit
import importlib
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import suppress

# What a new program imports again: gunicorn, and what a reload does.
OURS = re.compile(r'(gunicorn|app|schemas|serving|store|web|__config__)(\.|$)')
FORKSERVER = multiprocessing.get_context('forkserver')
# In the order in which gunicorn and our configuration import them.
FORKSERVER.set_forkserver_preload(
    [
        *('gunicorn.app.wsgiapp', 'gunicorn.arbiter', 'gunicorn.workers.ggevent'),
        *('falcon', 'jsonschema', 'jsonschema_rs'),
        *('difflib', 'hmac', 'logging.config', 'secrets', 'sqlite3', 'uuid'),
    ]
)


class WarmProcess:
    """``python -m gunicorn``, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, command, cwd, env, log):
        command = [str(word) for word in command]
        self._process = FORKSERVER.Process(target=_serve, args=(command, cwd, env, log))
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        """Return the exit code, as ``Popen`` does, or ``None`` while it runs."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """Wait until the server has ended; return its exit code."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired('gunicorn', timeout)
        return self.poll()

    def send_signal(self, number):
        """Send a signal to the server, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class WarmPopen(subprocess.Popen):
    """``Popen``, but ``gunicorn --check-config`` is a fork."""

    def __init__(self, command, **options):
        def check():
            before()
            _execute(None, command, options['env'], keeps=lambda number: False)

        if '--check-config' in command:
            before, options['preexec_fn'] = options['preexec_fn'], check
        super().__init__(command, **options)


def _execute(_, command, environment, keeps=os.get_inheritable):
    """Do what ``os.execvpe`` does, if the program is gunicorn again."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3, 256):
        with suppress(OSError):
            if not keeps(number):
                # Not closed: an object of before, which is still there, will close it.
                os.dup2(null, number, inheritable=False)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    atexit._clear()
    process = multiprocessing.Process(target=_become, args=(command, environment))
    code = process._bootstrap()
    atexit._run_exitfuncs()
    os._exit(code)


def _serve(command, directory, environment, log):
    """Become the server."""
    os.setsid()
    with open(log, 'ab') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(directory)
    subprocess.Popen, os.execvpe = WarmPopen, _execute
    _become(command, environment)


def _become(command, environment):
    """Do what the interpreter does with ``python -m gunicorn``."""
    # gunicorn reads the environment when it is imported, so it is imported again. What
    # it has imported itself stays.
    for name in list(sys.modules):
        if OURS.match(name):
            del sys.modules[name]
    importlib.invalidate_caches()
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv[:] = command
    sys.argv[:] = command[2:]
    # Without the directories of the tests.
    libraries = (f'{sys.base_prefix}/lib', sys.prefix)
    sys.path[:] = [os.getcwd(), *(p for p in sys.path if p.startswith(libraries))]
    runpy.run_module('gunicorn', run_name='__main__', alter_sys=True)
