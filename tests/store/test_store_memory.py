"""The store in memory, and what all stores have from ``store/base.py``."""

import pytest
from contract import FERN, NO_PLANTS, StoreContract, rivals

from store import Plant, check_plant, open_store
from store.base import batches


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        with open_store('memory:') as store:
            yield store

    def raw_plants(self, store):
        return list(store._plants.values())


def test_stores_share_nothing():
    """Each memory: is a store of its own."""
    one, other = open_store('memory:'), open_store('memory:')
    one.add(FERN)
    assert list(other) == []


def test_bulk_add_is_split_by_number_and_size():
    """A batch has at most 1,000 plants, and about a million characters."""
    for text, count, sizes in ('x', 2500, [1000, 1000, 500]), ('x' * 2**19, 3, [2, 1]):
        for member in Plant._fields[1:]:
            plant = Plant(0, '')._replace(**{member: text})
            plants = [plant._replace(id=id) for id in range(count)]
            assert [len(batch) for batch in batches(plants)] == sizes


def test_contract_has_plants_for_each_member():
    """The contract tells each member from others, and has no plants by each of them."""
    differences = {
        tuple(
            name for name in Plant._fields if getattr(one, name) != getattr(two, name)
        )
        for one, two in rivals()
    }
    assert {(name,) for name in Plant._fields[1:]} < differences
    wrong = set()
    for plant in NO_PLANTS:
        with pytest.raises(ValueError, match=r'^\w+: ') as refused:
            check_plant(plant)
        wrong.add(str(refused.value).partition(':')[0])
    assert wrong == {*Plant._fields}


def test_long_text_is_cut_in_an_error():
    """The error for what is no plant does not repeat a long text."""
    with pytest.raises(ValueError, match='name') as refused:
        check_plant(Plant(1, b'x' * 9999))
    assert len(str(refused.value)) < 99
