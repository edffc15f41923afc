"""The store in memory."""

import pytest

from store import Plant, check_plant, open_store
from store.base import batches
from store.testing import StoreContract
from store.testing.plants import NO_PLANTS, SIMILAR


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
    one.add(Plant(1, 'Fern'))
    assert list(other) == []


def test_bulk_add_is_split_by_number_and_size():
    """A batch has at most 1,000 plants, and about a million characters."""
    for text, count, sizes in ('x', 2500, [1000, 1000, 500]), ('x' * 2**19, 3, [2, 1]):
        plants = [Plant(id, text) for id in range(count)]
        assert [len(batch) for batch in batches(plants)] == sizes
        tagged = [Plant(id, '', text) for id in range(count)]
        assert [len(batch) for batch in batches(tagged)] == sizes


def test_contract_has_plants_for_each_member():
    """For each member, plants differ in it alone, and plants are refused for it."""
    for member in Plant._fields[1:]:
        alike = {plant._replace(**{member: None}) for plant in SIMILAR}
        assert len(alike) < len(SIMILAR), member
    wrong = set()
    for plant in NO_PLANTS:
        with pytest.raises(ValueError, match=r'^\w+: ') as refused:
            check_plant(plant)
        wrong.add(str(refused.value).partition(':')[0])
    assert wrong == {*Plant._fields}


def test_long_text_is_cut_in_an_error():
    """The error for what is no plant does not repeat a long text."""
    with pytest.raises(ValueError, match=r"^name: b'x{11}\.{3}x{13}' is not a string$"):
        check_plant(Plant(1, b'x' * 99))
