"""Start gunicorn by a fork of a process that has imported its libraries.

They take much of the CPU of a start, and the tests start hundreds of servers. Only
libraries are imported before the fork, and gunicorn again after it. What people type is
started as it is: see ``tests/serving/test_start.py``.
"""

import atexit
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys

FORKSERVER = multiprocessing.get_context('forkserver')
# In the order in which gunicorn and our configuration import them.
IMPORTED = ['gunicorn.app.wsgiapp', 'gunicorn.arbiter', 'gunicorn.workers.ggevent']
IMPORTED += ['falcon', 'jsonschema', 'jsonschema_rs', 'hmac', 'logging.config']
FORKSERVER.set_forkserver_preload(IMPORTED)


def cold_process(command, directory, environment, log):
    """Start a program as the leader of a process group, with its output in a file."""
    how = {'cwd': directory, 'env': environment, 'stdin': subprocess.DEVNULL}
    # A test may have made a socket inheritable.
    how |= {'start_new_session': True, 'close_fds': False, 'stderr': subprocess.STDOUT}
    with open(log, 'ab') as file:
        return subprocess.Popen(command, stdout=file, **how)


class WarmProcess:
    """``python -m gunicorn``, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, *arguments):
        self._process = FORKSERVER.Process(target=_serve, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired('gunicorn', timeout)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(command, directory, environment, log):
    """Become the server."""
    os.setsid()
    with open(log, 'ab') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # gunicorn reads the environment when it is imported.
    for name in list(sys.modules):
        if name.partition('.')[0] == 'gunicorn':
            del sys.modules[name]
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv[:] = command
    sys.argv[:] = command[2:]
    # Without the directories of the tests.
    libraries = (f'{sys.base_prefix}/lib', sys.prefix)
    sys.path[:] = [str(directory), *(p for p in sys.path if p.startswith(libraries))]
    atexit._clear()
    atexit.register(logging.shutdown)
    try:
        runpy.run_module('gunicorn', run_name='__main__', alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
