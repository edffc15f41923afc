import pytest

from store import PlantStore
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


def test_url():
    """The URL of a store in memory is memory: and nothing else."""
    assert isinstance(open_store('memory:'), MemoryStore)


def test_two_stores():
    """Two stores in memory share nothing."""
    assert open_store('memory:') is not open_store('memory:')


def test_size_is_not_known():
    """A store that does not say how many plants it has has none to speak of."""
    assert PlantStore.size_hint(MemoryStore()) == 0
