"""The lock of a plant file: between processes, and between threads of this one."""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from store.errors import StoreClosed, StoreUnavailable
from store.scheduler import THREADS

LOCK_WITHIN = 5.0  # seconds
# NOTE: flock() has no timeout, and a thread cannot be interrupted in it. So a waiter
# polls. It pauses for a share of the time that it has waited: an append takes 200 us,
# and whoever pauses for longer than the others finds the lock taken again and again.
PAUSE_SHARE = 1 / 8
SHORTEST_PAUSE = 0.000_05  # seconds
LONGEST_PAUSE = 0.01  # seconds

Call = Callable[[Callable[[], Any]], Any]  # calls a function that takes a while


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self._close = partial(os.close, fd)

    def __del__(self) -> None:
        self._close()


# Descriptors that are closed when they leave this dictionary. A forked child closes all
# at once: the lock belongs to both, and would outlive a parent that is killed in it.
# NOTE: a callback is never removed. This one keeps no module in memory after a reload.
_open: dict[object, _Descriptor] = {}
os.register_at_fork(after_in_child=_open.clear)


class FileLock:
    """An ``flock`` on a plant file, with a descriptor that belongs to the lock."""

    def __init__(self, path: Path, fd: int) -> None:
        self._fd = fd
        _open[self] = _Descriptor(fd)
        self._path = path
        self._mutex = threading.Lock()  # threads share the descriptor, so the flock too
        self.closed = False  # set by a holder of the lock: nobody takes it after that

    def close(self) -> None:
        """Close the descriptor, which a forked child has done already."""
        _open.pop(self, None)

    @contextmanager
    def held(
        self, within: float | None = None, call: Call = THREADS.call
    ) -> Iterator[None]:
        """Hold the lock; wait for ``within`` seconds, and ``call`` the pauses."""
        deadline = time.monotonic() + (LOCK_WITHIN if within is None else within)
        _poll(lambda: self._mutex.acquire(blocking=False), self._path, deadline, call)
        try:
            if self.closed:
                raise StoreClosed
            _poll(lambda: try_flock(self._fd), self._path, deadline, call)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()


def take_flock(path: Path, fd: int, operation: int = fcntl.LOCK_EX) -> None:
    """Take the lock of a plant file for a command, as ``FileLock.held`` does."""
    deadline = time.monotonic() + LOCK_WITHIN
    _poll(lambda: try_flock(fd, operation), path, deadline, THREADS.call)


def try_flock(fd: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Take the lock if it is free; return whether it was."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _poll(attempt: Callable[[], bool], path: Path, deadline: float, call: Call) -> None:
    """Repeat an attempt until it succeeds, or raise ``StoreUnavailable``."""
    began = time.monotonic()
    while not attempt():
        now = time.monotonic()
        if now > deadline:
            reason = 'another process or thread holds the lock of the file'
            raise StoreUnavailable(reason, store=str(path))
        pause = min(max(SHORTEST_PAUSE, PAUSE_SHARE * (now - began)), LONGEST_PAUSE)
        call(partial(time.sleep, pause))
