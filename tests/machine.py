"""Processes, sockets and files of this machine, as tests see and change them."""

import fcntl
import os
import re
import shutil
import signal
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from server import PATIENCE, REPOSITORY, ROOMS, RawClient, is_alive, wait_until


def client_at(path, source=''):
    """Return a client of the unix socket at a path, bound to a source."""
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(PATIENCE)
    try:
        if source:
            connected.bind(source)
        connected.connect(str(path))
    except OSError:
        connected.close()
        raise
    return RawClient(over=connected)


def only_worker(server):
    """Return the process id of the only worker."""
    (pid,) = server.worker_pids()
    return pid


def child_pids(pid):
    """Return the process ids of the children of a process."""
    found = set()
    for task in Path(f'/proc/{pid}/task').iterdir():  # threads have children, too
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found |= set(map(int, (task / 'children').read_text().split()))
    return found


def count_sockets(server):
    """Return how many sockets the only worker has open."""
    time.sleep(0.02)  # callers poll this function
    names = []
    for entry in Path(f'/proc/{only_worker(server)}/fd').iterdir():
        with suppress(FileNotFoundError):  # it was closed in between
            names.append(os.readlink(entry))
    return sum(name.startswith('socket:') for name in names)


@contextmanager
def paused(server):
    """Stop the only worker; all that is sent meanwhile has then come at once."""
    pid = only_worker(server)
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f'/proc/{pid}/stat')
    wait_until(lambda: ') T ' in stat.read_text(), 'the worker is stopped')
    yield
    os.kill(pid, signal.SIGCONT)


def stop(server):
    """Stop a server, and return when its worker accepts no more connections."""
    server.signal(signal.SIGTERM)

    def refuses():
        try:
            server.connect().close()
        except ConnectionError:
            return True

    wait_until(refuses, 'it accepts no more connections')


@contextmanager
def upgraded(server):
    """Send SIGUSR2: a second master runs beside the first, with its own workers."""
    old, masters = len(server.worker_pids()), server.log.count('Listening at')
    server.signal(signal.SIGUSR2)
    wait_until(lambda: server.log.count('Listening at') > masters, 'a new master runs')
    new = int(re.findall(r'Listening at: \S+ \((\d+)\)', server.log)[-1])
    try:
        wait_until(lambda: len(server.worker_pids()) == 2 * old, 'both have workers')
        yield new
    finally:
        with suppress(ProcessLookupError):
            os.kill(new, signal.SIGTERM)
        wait_until(lambda: not is_alive(new), 'the new one ends')
        if is_alive(server.pid):  # it hears the next signal alone
            wait_until(lambda: not Path(f'/proc/{new}').exists(), 'it is reaped')


@contextmanager
def locked(path, how=fcntl.LOCK_EX):
    """Hold the lock of a plant file, as any process may that can read the file."""
    with path.open('rb') as file:
        fcntl.flock(file, how)
        yield


def edit(path, old, new):
    """Replace the only occurrence of a text in a file."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def copy_checkout(directory):
    """Copy the files of a checkout into a directory."""
    # With the bytecode, but without what another process just writes of it.
    ignore = shutil.ignore_patterns('*.pyc.*')
    for name in ROOMS:
        if name.endswith('.py'):
            shutil.copy(REPOSITORY / name, directory)
        else:
            shutil.copytree(REPOSITORY / name, directory / name, ignore=ignore)
