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


class Probe:
    """What is in use by a store, and takes long to say whether it works."""

    now = most = asked = 0

    def ping(self):
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.01)
        self.asked += 1
        self.now -= 1


class ProbedStore(SlowStore):
    """A store that is asked whether it is ready more often than it can say."""

    probe = Probe()

    def _open(self):
        return self.probe


def test_one_ping_at_a_time():
    """However many ask whether a store is ready, and however slow it is, one does."""
    store = ProbedStore()

    def ask(place):
        for _ in range(5):
            store.ping()
            time.sleep(0.002 * place)  # so that they do not all come together

    in_threads(*(lambda place=place: ask(place) for place in range(8)))
    assert store.probe.most == 1
    assert 5 <= store.probe.asked < 5 * 8
