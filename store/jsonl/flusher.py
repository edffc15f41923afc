"""The thread that flushes the index of a plant file."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

# Seconds from an add to the flush of its id. The stretch behind the mark must be short:
# there damage by a person cannot always be told from what a crash leaves.
FLUSH_WITHIN = 1.0
FLUSH_AGAIN = 0.05  # seconds after a flush that failed, or that found another one


class Flusher:
    """Calls a function a second after an add, or at once.

    Args:
        flush: Returns whether nothing is left to flush.
        path: The path of the plant file, for messages.
    """

    def __init__(self, flush: Callable[[], bool], path: Path) -> None:
        self._flush = flush
        self._path = path
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._hurry = threading.Event()
        self._stopped = False

    def want(self, *, at_once: bool) -> None:
        """Have the function called; the first call starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        if not self._wanted.is_set():
            self._wanted.set()
        if at_once:
            self._hurry.set()

    def stop(self) -> None:
        """End the thread, after a flush that is in progress."""
        self._stopped = True
        self._hurry.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        failure = ''
        while self._wanted.wait():
            self._hurry.wait(FLUSH_WITHIN)
            if self._stopped:
                break
            self._wanted.clear()
            self._hurry.clear()
            is_done = False
            try:
                is_done = self._flush()
                failure = ''
            except OSError as ex:
                if str(ex) != failure:  # once, though the disk stays full
                    failure = str(ex)
                    log.info('%s: the index is not flushed: %s', self._path, ex)
            if not is_done:
                self._wanted.set()
                time.sleep(FLUSH_AGAIN)
