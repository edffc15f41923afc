"""``check --repair``: damaged lines go to a side file, and are blanked in place."""

from disk import assert_stored, lines, take_side_files

from store import Plant
from store.jsonl import JSONLinesStore
from store.jsonl.repair import Verified, verify

FERN, MOSS = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade')


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
