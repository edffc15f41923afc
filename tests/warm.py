"""Start gunicorn by a fork of a process that has imported its libraries.

These imports take two thirds of the CPU of a start, and the tests start hundreds of
servers. Nothing of gunicorn and of the service is there before the fork. The commands
that people type are started as they are: see ``tests/serving/test_start.py``.

This module is also the script of that process.
"""

import atexit
import os
import pickle
import runpy
import select
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module

# In the order in which gunicorn and our configuration import them.
LIBRARIES = (
    *('gunicorn.app.wsgiapp', 'gunicorn.arbiter', 'gunicorn.workers.ggevent'),
    *('falcon', 'jsonschema', 'jsonschema_rs'),
)


class WarmProcess:
    """``python -m gunicorn``, with the part of ``subprocess.Popen`` that tests use.

    Args:
        command: The command, from ``sys.executable`` on.
        cwd: The working directory.
        env: The environment.
        log: A file for stdout and stderr.

    Attributes:
        pid: The process id of the server, which leads a session of its own.
    """

    def __init__(self, command, cwd, env, log):
        # Each number is a packet, also when both have been sent.
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with status:
            order = pickle.dumps(([str(word) for word in command], str(cwd), env))
            socket.send_fds(_forker(), [order], [status.fileno(), log.fileno()])
        self.pid = int(self._status.recv(16))
        self._returncode = None

    def poll(self):
        """Return the exit code, as ``Popen`` does, or ``None`` while it runs."""
        if self._returncode is None and select.select([self._status], [], [], 0)[0]:
            self._returncode = int(self._status.recv(16))
            self._status.close()
        return self._returncode

    def wait(self, timeout=None):
        """Wait until the server has ended; return its exit code."""
        if self._returncode is None:
            select.select([self._status], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired('gunicorn', timeout)
        return self._returncode

    def send_signal(self, number):
        """Send a signal to the server, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


@cache
def _forker():
    """Start the process that forks; return the socket for its orders."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @atexit.register
    def end():
        ours.close()
        process.wait()

    return ours


def _take_order(orders):
    """Fork for each order; return only in the process that becomes the server."""
    while True:
        order, fds, _, _ = socket.recv_fds(orders, 2**18, 2)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not order:
            sys.exit()
        if not os.fork():
            break
        for fd in fds:
            os.close(fd)
    orders.close()
    status, log = fds
    if pid := os.fork():  # this process waits for the server, to report how it ends
        os.write(status, b'%d' % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, b'%d' % code)
        os._exit(0)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in fds:
        os.close(fd)
    return pickle.loads(order)


def main():
    """Fork servers, until the tests have ended."""
    for name in LIBRARIES:
        import_module(name)
    # gunicorn reads the environment when it is imported. What it imports stays.
    for name in list(sys.modules):
        if name.partition('.')[0] == 'gunicorn':
            del sys.modules[name]
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        command, directory, environment = _take_order(orders)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv[:] = command
    sys.argv[:] = command[2:]
    sys.path[0] = directory
    runpy.run_module('gunicorn', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    main()
