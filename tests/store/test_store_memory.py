"""The store in memory."""

import pytest

from store import open_store
from store.memory import MemoryStore
from store.testing import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store

    def raw_plants(self, store):
        return list(store._plants.values())


def test_url_opens_a_memory_store():
    """The URL memory: opens a store in memory."""
    assert isinstance(open_store('memory:'), MemoryStore)


def test_each_url_opens_a_new_store():
    """Two stores in memory share nothing."""
    assert open_store('memory:') is not open_store('memory:')
