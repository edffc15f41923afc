"""How the callers of a store wait, and what runs while they do.

A caller of a store may be interrupted between any two instructions: a greenlet is
killed, Ctrl-C or another signal raises in the main thread, a library in any thread. So
no caller does critical work itself. It runs in threads of the store, which no exception
of a caller reaches, and the caller only waits: it may leave at any moment.

By default the callers are threads. A server that serves many requests in one thread
passes a scheduler of its own to ``open_store``, and serves others meanwhile.
"""

import _thread
from collections.abc import Callable
from typing import Any, Final, TypeVar

Result = TypeVar('Result')
Wait = Callable[[float], bool]
Wake = Callable[[], object]


class Scheduler:
    """How the callers of a store wait; here each caller is a thread of its own."""

    def start(self, function: Callable[[], object]) -> None:
        """Run a function in a thread of its own; it must not raise.

        NOTE: not ``threading.Thread``, whose ``start`` can be interrupted half way.
        """
        _thread.start_new_thread(function, ())

    def lock(self) -> Any:
        """Return a lock for the threads that ``start`` makes."""
        return _thread.allocate_lock()

    def waiter(self) -> tuple[Wait, Wake]:
        """Return two functions, ``wait`` and ``wake``.

        ``wait`` takes some seconds at most, and returns whether ``wake`` was called.
        Any thread may call ``wake``, once, even before or after the wait.
        """
        # A bare lock parks a thread at the least cost: an Event costs four times that.
        lock = _thread.allocate_lock()
        lock.acquire()
        return lambda seconds: lock.acquire(timeout=seconds), lock.release

    def gathered(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return a function that calls ``function``, perhaps once for many calls.

        All callers that are ready can then go first, and share a batch.
        """
        return function

    def call(
        self, function: Callable[[], Result], *, within: float = _thread.TIMEOUT_MAX
    ) -> Result:
        """Call a function that blocks, in a thread, and return its result.

        The function goes on if its caller is interrupted, or if it takes longer than
        ``within`` seconds, which raises ``TimeoutError``.
        """
        outcome: list[tuple[Result | None, BaseException | None]] = []
        wait, wake = self.waiter()

        def run() -> None:
            try:
                outcome.append((function(), None))
            except BaseException as ex:
                outcome.append((None, ex))
            wake()

        try:
            self.start(run)
        except RuntimeError:  # there are no more threads, or the interpreter ends
            run()
        if not wait(within):
            raise TimeoutError
        [(result, error)] = outcome
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


THREADS: Final = Scheduler()
