"""``check --repair``: damaged lines go to a side file, and are blanked in place."""

from functools import partial

import pytest
from disk import append, assert_raise, assert_stored, fill, lines, take_side_files

from store import Plant, StoreCorrupt
from store.jsonl import JSONLinesStore
from store.jsonl.repair import Verified, verify

FERN, MOSS, IVY = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Ivy')


def test_damage_of_any_length_is_blanked(path):
    """Blanked lines of more bytes than a record may have are blank for a start, too."""
    damage = (b'no plant' * 20 + b'\n') * 50_000
    path.write_bytes(lines(FERN) + damage + lines(MOSS))
    assert verify(path, repair=True).repaired
    assert take_side_files(path) == [damage]
    assert verify(path) == Verified(2)
    size = path.stat().st_size
    assert_stored(path, [FERN, MOSS], free=[3])
    assert path.stat().st_size == size + len(lines(Plant(3, 'Free')))
    with JSONLinesStore(path) as store:
        assert [plant.id for plant in store] == [1, 2, 3]


@pytest.mark.parametrize('running', [True, False], ids=['running', 'at-open'])
def test_second_plant_with_an_id_is_damage(path, running):
    """It is refused until it is repaired; what follows it is kept and known."""
    rival, repeat = FERN._replace(name='Reed'), FERN
    with JSONLinesStore(path) as store:
        if running:
            store.add(FERN)
            append(path, lines(repeat, rival, MOSS))
        else:
            path.write_bytes(lines(FERN, repeat, rival, MOSS))
        uses = 2 * [partial(store.add, IVY), store.ping]
        assert_raise(StoreCorrupt, *uses, match='line 3')
        assert verify(path, repair=True).repaired
        assert take_side_files(path) == [lines(rival)]
        assert_stored(store, [FERN, MOSS], free=[IVY.id])


def test_check_beside_a_server_confirms_damage(path):
    """A torn tail that a server mends meanwhile is no damage."""
    two = [Plant(1, 'Fern'), Plant(2, 'Moss')]
    path.write_bytes(lines(*two) + b'{"id":3,"name":"Iv')

    def progress(found):
        for line in found:
            if line.offset == len(lines(*two)):
                fill(path, *(Plant(id, f'Ivy {id}') for id in range(3, 100)))
            yield line

    assert verify(path, progress=progress) == Verified(2)
    assert verify(path) == Verified(99)
    append(path, b'{"id":\n')
    assert len(verify(path).damaged) == 1
