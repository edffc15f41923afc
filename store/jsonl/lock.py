"""The lock of a plant file: an ``flock`` on the file itself.

It excludes descriptors, not processes, and the kernel releases it when its owner dies.
A forked child closes the descriptor of its parent (``store/forks.py``): otherwise it
would keep the lock of a parent that was killed.
"""

import fcntl
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from store.errors import StoreUnavailable

log = logging.getLogger(__name__)

LOCK_WITHIN = 4.5  # seconds; an add, which also waits for a batch, has 5
SAID_AFTER = 2.0  # seconds, until a wait is told in the log
HELD = 'another process or thread holds the lock of the file'
# NOTE: flock() has no timeout, so a waiter polls. It pauses for a share of the time it
# has waited: with longer pauses it would find the lock taken again and again.
PAUSE_SHARE, SHORTEST_PAUSE, LONGEST_PAUSE = 1 / 8, 0.000_05, 0.01  # seconds

Result = TypeVar('Result')


def patiently(
    call: Callable[[], Result], path: Path, reason: str, within: float | None
) -> Result:
    """Call until it would not block, for some seconds at most; return its result."""
    within = LOCK_WITHIN if within is None else within
    began, said = time.monotonic(), False
    while True:
        try:
            return call()
        except BlockingIOError as ex:
            waited = time.monotonic() - began
            if waited >= within:
                raise StoreUnavailable(reason, store=str(path)) from ex
        if waited > SAID_AFTER and not said:
            said = True
            log.warning('%s: waiting: %s', path, reason)
        time.sleep(min(max(SHORTEST_PAUSE, PAUSE_SHARE * waited), LONGEST_PAUSE))


def take(
    path: Path, fd: int, operation: int = fcntl.LOCK_EX, within: float | None = None
) -> None:
    """Take the lock, within ``LOCK_WITHIN`` or other seconds.

    It must be released, also after an error here, or the file be closed.
    """
    patiently(partial(fcntl.flock, fd, operation | fcntl.LOCK_NB), path, HELD, within)


def release(fd: int) -> None:
    """Release the lock, if it was taken."""
    fcntl.flock(fd, fcntl.LOCK_UN)
