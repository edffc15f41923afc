"""The lock of a plant file, among processes and among the threads of this one."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from store.errors import StoreUnavailable

LOCK_WITHIN = 5.0  # seconds
# NOTE: flock() has no time-out, and a thread that is blocked in it cannot be called
# back, so whoever waits looks again and again: soon at first, since an append takes
# about 200 us.
FIRST_PAUSE = 0.000_05  # seconds
LONGEST_PAUSE = 0.01


def _directly(function: Callable[[], bool]) -> bool:
    return function()


class FileLock:
    """An ``flock``, which the kernel gives back when its owner dies.

    Args:
        fd: Of the plant file.
        path: For messages.
    """

    def __init__(self, fd: int, path: object) -> None:
        self._fd = fd
        self._path = path
        self._mutex = threading.Lock()  # threads share the descriptor, so the flock too

    @contextmanager
    def held(
        self,
        within: float = LOCK_WITHIN,
        call: Callable[[Callable[[], bool]], bool] = _directly,
    ) -> Iterator[None]:
        """Hold the lock.

        Args:
            within: How long to wait, in seconds.
            call: Called with a function that waits; the scheduler's, in a server.

        Raises:
            StoreUnavailable: It was not free in time.
        """
        deadline = time.monotonic() + within
        if not (
            self._mutex.acquire(blocking=False)
            or call(partial(self._mutex.acquire, timeout=within))
        ):
            raise self._busy()
        try:
            if not (try_flock(self._fd) or call(partial(self._wait, deadline))):
                raise self._busy()
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _wait(self, deadline: float) -> bool:
        return wait_for_flock(self._fd, fcntl.LOCK_EX, deadline)

    def _busy(self) -> StoreUnavailable:
        return StoreUnavailable(
            'somebody else holds the lock of the file', store=str(self._path)
        )


def try_flock(fd: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Return whether the lock could be had at once."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_flock(fd: int, operation: int, deadline: float) -> bool:
    """Return whether the lock could be had until a time of the monotonic clock."""
    pause = FIRST_PAUSE
    while not try_flock(fd, operation):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True
