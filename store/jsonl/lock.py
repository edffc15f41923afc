"""The lock of a plant file: between processes, and between threads of this one."""

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from store.errors import StoreClosed, StoreUnavailable

LOCK_WITHIN = 4.5  # seconds; an add, which also waits for a batch, has 5
# NOTE: flock() has no timeout, so a waiter polls. It pauses for a share of the time it
# has waited: with longer pauses it would find the lock taken again and again.
PAUSE_SHARE = 1 / 8
SHORTEST_PAUSE = 0.000_05  # seconds
LONGEST_PAUSE = 0.01  # seconds


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self._close = partial(os.close, fd)

    def __del__(self) -> None:
        self._close()


# Descriptors that close when they leave this dictionary. A forked child closes all: it
# shares the lock, which would otherwise outlive a parent that is killed with it.
# NOTE: a callback is never removed. This one keeps no module in memory after a reload.
_open: dict[object, _Descriptor] = {}
os.register_at_fork(after_in_child=_open.clear)


class FileLock:
    """An ``flock`` on a plant file, with a descriptor of its own from ``open_again``.

    Nothing may interrupt the threads that hold the lock.
    """

    def __init__(self, path: Path, open_again: Callable[[], int]) -> None:
        self._path = path
        self._open_again = open_again
        self._fd = -1
        self.mutex = threading.Lock()  # threads share the descriptor, so the flock too
        self.closed = False  # set with the mutex: nobody takes the lock after that

    def close(self) -> None:
        """Close the descriptor, which a forked child has done already."""
        _open.pop(self, None)
        self._fd = -1

    @contextmanager
    def held(self, within: float = math.inf) -> Iterator[None]:
        """Hold the lock; wait for ``within`` seconds, and ``LOCK_WITHIN`` at most."""
        deadline = time.monotonic() + min(within, LOCK_WITHIN)
        _poll(lambda: self.mutex.acquire(blocking=False), self._path, deadline)
        try:
            if self.closed:
                raise StoreClosed
            if self._fd < 0:
                self._fd = self._open_again()
                _open[self] = _Descriptor(self._fd)
            _poll(lambda: try_flock(self._fd), self._path, deadline)
            try:
                yield
            finally:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
                except OSError:
                    self.close()  # the kernel then releases the lock in any case
        finally:
            self.mutex.release()


def take_flock(path: Path, fd: int, operation: int = fcntl.LOCK_EX) -> None:
    """Take a lock of a plant file; wait for ``LOCK_WITHIN`` seconds at most."""
    deadline = time.monotonic() + LOCK_WITHIN
    _poll(lambda: try_flock(fd, operation), path, deadline)


def try_flock(fd: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Take the lock if it is free; return whether it was."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _poll(attempt: Callable[[], bool], path: Path, deadline: float) -> None:
    """Repeat an attempt until it succeeds, or raise ``StoreUnavailable``."""
    began = time.monotonic()
    while not attempt():
        now = time.monotonic()
        if now > deadline:
            reason = 'another process or thread holds the lock of the file'
            raise StoreUnavailable(reason, store=str(path))
        pause = min(max(SHORTEST_PAUSE, PAUSE_SHARE * (now - began)), LONGEST_PAUSE)
        time.sleep(pause)
