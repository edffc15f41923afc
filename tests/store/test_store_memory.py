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


@pytest.mark.parametrize(
    'url', ['', 'memory', 'memory:x', 'memory://', 'Memory:', 'jsonl:', 'jsonl', 'x:y']
)
def test_not_a_url(url):
    """What is not the URL of a store is refused, in words that say what is one."""
    with pytest.raises(
        ValueError, match='is not a store: use memory:, jsonl:PATH, or postgresql'
    ):
        open_store(url)


def test_two_stores():
    """Two stores in memory share nothing."""
    assert open_store('memory:') is not open_store('memory:')


def test_size_is_not_known():
    """A store that does not say how many plants it has has none to speak of."""
    assert PlantStore.size_hint(MemoryStore()) == 0
