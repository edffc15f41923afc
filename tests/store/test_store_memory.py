"""The store in memory."""

import re

import pytest

from store import Plant, check_plant, open_store
from store.testing import StoreContract


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


@pytest.mark.parametrize(
    ('plant', 'sentence'),
    [
        (Plant(True, 'Fern'), 'id: True is not an integer'),
        (Plant(2**63, 'Fern'), 'id: it is not a 64-bit integer'),
        (Plant(1, b'x' * 99), "name: b'xxxxxxxxxxx...xxxxxxxxxxxxx' is not a string"),
        (Plant(1, 'Fe\0rn'), 'name: it holds U+0000'),
        (Plant(1, 'Fern', '\ud800'), 'tag: it holds a lone surrogate'),
    ],
)
def test_no_plant_is_refused_with_a_sentence(plant, sentence):
    """The error names the member and the rule; a long text is cut."""
    with pytest.raises(ValueError, match=f'^{re.escape(sentence)}$'):
        check_plant(plant)
