"""The store in memory, and what all stores have from ``store/base.py``."""

import pytest
from contract import StoreContract

from store import Plant, open_store
from store.base import batches


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        with open_store('memory:') as store:
            yield store

    def raw_plants(self, store):
        return list(store._plants.values())


def test_bulk_add_is_split_by_number_and_size():
    """A batch has at most 1,000 plants, and about a million characters."""
    for text, count, sizes in ('x', 2500, [1000, 1000, 500]), ('x' * 2**19, 3, [2, 1]):
        for member in Plant._fields[1:]:
            plants = [Plant(0, '')._replace(**{member: text})] * count
            assert [len(batch) for batch in batches(plants)] == sizes
