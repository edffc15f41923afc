"""The lock of a plant file, among processes and among the threads of this one."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager

from store.errors import StoreClosed
from store.errors import StoreUnavailable

LOCK_WITHIN = 5.0  # seconds
# NOTE: flock() has no time-out, and a thread that is blocked in it cannot be called
# back, so a caller that waits tries again and again. It pauses for a share of the time
# that it has waited, within two bounds: an append takes about 200 us, and a caller that
# pauses for longer than the others do finds the lock taken again and again.
PAUSE_SHARE = 1 / 8
SHORTEST_PAUSE = 0.000_05  # seconds
LONGEST_PAUSE = 0.01


Sleep = Callable[[float], object]


class FileLock:
    """An ``flock``, which the kernel gives back when its owner dies.

    Args:
        fd: Of the plant file.
        path: For messages.

    Attributes:
        closed: Set by its holder before the descriptor is closed.
    """

    def __init__(self, fd: int, path: object) -> None:
        self._fd = fd
        self._path = path
        self._mutex = threading.Lock()  # threads share the descriptor, so the flock too
        self.closed = False

    @contextmanager
    def held(
        self, within: float | None = None, sleep: Sleep = time.sleep
    ) -> Iterator[None]:
        """Hold the lock.

        Args:
            within: How long to wait, in seconds; ``LOCK_WITHIN`` by default.
            sleep: How to wait for a moment. It takes nothing, so that a caller that is
                interrupted leaves nothing taken behind.

        Raises:
            StoreClosed: The file was closed.
            StoreUnavailable: The lock was not free in time.
        """
        deadline = time.monotonic() + (LOCK_WITHIN if within is None else within)
        if not _until(lambda: self._mutex.acquire(blocking=False), deadline, sleep):
            raise _busy(self._path)
        try:
            if self.closed:
                raise StoreClosed
            if not _until(lambda: try_flock(self._fd), deadline, sleep):
                raise _busy(self._path)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()


def _busy(path: object) -> StoreUnavailable:
    reason = 'somebody else holds the lock of the file'
    return StoreUnavailable(reason, store=str(path))


def take_flock(path: object, fd: int, operation: int) -> None:
    """Take the lock of a plant file for a command, as ``FileLock.held`` does."""
    deadline = time.monotonic() + LOCK_WITHIN
    if not _until(lambda: try_flock(fd, operation), deadline, time.sleep):
        raise _busy(path)


def try_flock(fd: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Return whether the lock could be had at once."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _until(attempt: Callable[[], bool], deadline: float, sleep: Sleep) -> bool:
    """Return whether an attempt had success before a time of the monotonic clock."""
    if attempt():
        return True
    began = time.monotonic()
    while not attempt():
        now = time.monotonic()
        if now > deadline:
            return False
        sleep(min(max(SHORTEST_PAUSE, PAUSE_SHARE * (now - began)), LONGEST_PAUSE))
    return True
