"""What opens in the process that first uses it, and again in a child of a fork."""

from __future__ import annotations

import abc
import os
import threading
import weakref
from functools import partial
from typing import Any
from typing import Generic
from typing import Protocol
from typing import TypeVar

from store import waiting
from store.base import PlantStore
from store.errors import StoreClosed
from store.group_commit import GroupCommit


class Opened(Protocol):
    """What a store holds while it is in use."""

    def ping(self) -> None:
        """Raise what an add would raise now."""

    def close(self) -> None:
        """Give it back."""

    def abandon(self) -> None:
        """Let go of it in a child of a fork: the parent goes on with it."""


OpenedT = TypeVar('OpenedT', bound=Opened)


class LazyStore(PlantStore, Generic[OpenedT]):
    """A store that touches nothing until it is used.

    Nothing opened before a fork is used after it. Parent and child would share one
    ``flock`` and exclude neither, or one connection and mix their words, and a lock
    that is held at the fork stays held.
    """

    def __init__(self) -> None:
        self._closed = False
        self._start()
        os.register_at_fork(after_in_child=partial(_forget, weakref.ref(self)))

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._in_use: OpenedT | None = None
        # Many ask at once whether a store is ready; those that wait share an answer.
        # One at a time: a database has no more connections than that to spare.
        self._pings = GroupCommit[None, bool](
            lambda batch: True, self._ping, slow_syncs_in_flight=1
        )

    @abc.abstractmethod
    def _open(self) -> OpenedT:
        """Open it; called again at the next use if it raises."""

    def ping(self) -> None:
        self._pings.submit(None, 0)

    def _ping(self, asked: bool) -> None:
        self._opened().ping()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            in_use, self._in_use = self._in_use, None
        if in_use is not None:
            in_use.close()

    def _opened(self) -> OpenedT:
        in_use = self._in_use
        if in_use is not None:
            return in_use
        return waiting.current.call(self._open_now)

    def _open_now(self) -> OpenedT:
        with self._lock:
            self._check_open()
            if self._in_use is None:
                self._in_use = self._open()
            return self._in_use

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed


# Not covered: it runs in a child of a fork, where coverage is not measured.
def _forget(reference: weakref.ref[LazyStore[Any]]) -> None:  # pragma: no cover
    store = reference()
    if store is not None:
        if store._in_use is not None:
            store._in_use.abandon()
        store._start()
