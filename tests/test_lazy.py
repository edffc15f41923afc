"""A store opens when it is first used, once."""

import threading
import time

from store_contract import in_threads

from store.lazy import LazyStore


class SlowStore(LazyStore):
    """A store that others find opening when they come."""

    opened = 0

    def add(self, plant):
        return self._opened()

    __iter__ = None

    def _open(self):
        self.opened += 1
        # They come now, and find it neither open nor theirs to open.
        barrier.wait()
        time.sleep(0.05)
        return object()


barrier = threading.Barrier(4)


def test_opened_once():
    """Of many who use a store first, one opens it, and all use what that one opened."""
    store = SlowStore()
    used = []

    def use(comes_later):
        if comes_later:
            barrier.wait()
        used.append(store.add(None))

    in_threads(*(lambda later=later: use(later) for later in (False, True, True, True)))
    assert store.opened == 1
    assert len(used) == 4
    assert len(set(used)) == 1
