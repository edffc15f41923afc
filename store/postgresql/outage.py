"""An outage: the time in which a database does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from store.errors import StoreUnavailable
from store.postgresql import limits


class Outage:
    """Spares callers the wait for a database that does not answer.

    During an outage one caller at a time asks the database, ``RETRY_AFTER`` seconds
    after the last one. All others are refused at once.

    Args:
        store: The name of the store in messages.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._lock = threading.Lock()  # guards what follows
        self._reason: str | None = None  # set during an outage
        self._next_attempt = 0.0
        self._is_asking = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Run a block that asks the database, and learn from how it ends.

        An outage begins when the block raises ``StoreUnavailable``. It ends when the
        block ends well or raises an error of the database, since that is an answer.
        Any other exception, for example a full pool, changes nothing.

        Raises:
            StoreUnavailable: There is an outage, and it is not yet time to ask, or
                somebody asks already.
        """
        reason = self._admit()
        try:
            yield
            reason = None
        except StoreUnavailable as ex:
            reason = ex.reason
            raise
        except psycopg.Error:
            reason = None
            raise
        finally:
            with self._lock:
                self._reason = reason
                self._next_attempt = time.monotonic() + limits.RETRY_AFTER
                self._is_asking = False

    def _admit(self) -> str | None:
        with self._lock:
            if self._reason is not None:
                if self._is_asking or time.monotonic() < self._next_attempt:
                    raise StoreUnavailable(self._reason, store=self._store)
                self._is_asking = True
            return self._reason
