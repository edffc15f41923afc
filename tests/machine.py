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

from server import PATIENCE, REPOSITORY, ROOMS, RawClient


def client_at(path, trust=None):
    """Return a client of the Unix socket at a path."""
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(PATIENCE)
    try:
        connected.connect(str(path))
    except OSError:
        connected.close()
        raise
    return RawClient(over=connected, trust=trust)


def only_worker(server):
    """Return the process id of the only worker."""
    (pid,) = server.worker_pids()
    return pid


def open_files(pid='self'):
    """Return what the descriptors of a process are: paths, ``socket:[...]``."""
    names = {}
    for entry in Path(f'/proc/{pid}/fd').iterdir():
        with suppress(FileNotFoundError):  # it was closed in between
            names[int(entry.name)] = os.readlink(entry)
    return names


def kib(figure, pid='self', file='smaps_rollup'):
    """Return a figure that a file in /proc has of a process: its memory, in KiB."""
    text = Path(f'/proc/{pid}/{file}').read_text()
    return int(re.search(rf'(?m)^{figure}:\s+(\d+) kB', text)[1])


def count_sockets(server):
    """Return how many sockets the only worker has open."""
    time.sleep(0.02)  # callers poll this function
    names = open_files(only_worker(server)).values()
    return sum(name.startswith('socket:') for name in names)


@contextmanager
def locked(path, how=fcntl.LOCK_EX):
    """Hold the lock of a plant file, as any process may that can read the file."""
    with path.open('rb') as file:
        fcntl.flock(file, how)
        yield


@contextmanager
def paused(pid):
    """Stop a process for a while, as a machine does that is moved or has no time."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


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
