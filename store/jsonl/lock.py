"""The lock of a plant file: an ``flock`` on the file itself.

It excludes descriptors, not processes, and the kernel releases it when its owner dies.
A forked child closes the descriptor of its parent (``store/forks.py``): otherwise it
would keep the lock of a parent that was killed.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.errors import StoreUnavailable

LOCK_WITHIN = 4.5  # seconds; an add, which also waits for a batch, has 5
# NOTE: flock() has no timeout, so a waiter polls. It pauses for a share of the time it
# has waited: with longer pauses it would find the lock taken again and again.
PAUSE_SHARE, SHORTEST_PAUSE, LONGEST_PAUSE = 1 / 8, 0.000_05, 0.01  # seconds


@contextmanager
def held(path: Path, fd: int, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock; wait for ``LOCK_WITHIN`` seconds at most."""
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
            break
        except BlockingIOError as ex:
            waited = time.monotonic() - began
            if waited >= LOCK_WITHIN:
                reason = 'another process or thread holds the lock of the file'
                raise StoreUnavailable(reason, store=str(path)) from ex
        time.sleep(min(max(SHORTEST_PAUSE, PAUSE_SHARE * waited), LONGEST_PAUSE))
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
