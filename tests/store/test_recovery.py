"""What a crash has left is mended; all else that is no plant is refused, or repaired.

No record is ever cut, and no byte is lost: it is in the file, or in a side file.
"""

import contextlib
import fcntl
import json
import os
from functools import partial

import pytest
from disk import append, assert_raise, assert_stored, lines, raw_plants, take_side_files
from hypothesis import example, given
from hypothesis import strategies as st

from store import IdTaken, Plant, StoreCorrupt, StoreUnavailable
from store.jsonl import JSONLinesStore
from store.jsonl import file as plant_file
from store.jsonl.repair import Verified, verify

PLANTS = [
    Plant(1, 'Fern'),
    Plant(2, 'Moss', 'shade'),
    Plant(3, 'Gräser 🌱 \u2028'),
    Plant(-4, '"\\\n', ''),
]
OAK = Plant(9, 'Oak')
TWO = lines(*PLANTS[:2])
BATCH = [Plant(id, 'Moss', 'y' * 100) for id in range(10, 40)]
RUNNING = pytest.mark.parametrize('running', [True, False], ids=['running', 'at-open'])


@contextlib.contextmanager
def opened(path, running):
    """Yield a store that has a file of two plants open, or not yet."""
    for file in path.parent.glob('plants*'):
        file.unlink()
    path.write_bytes(TWO)
    with JSONLinesStore(path) as store:
        if running:
            store.ping()
        yield store


START = b'{"id":3,"na'
# Ends with lost blocks that a crash can have left after the first two plants.
LOST = [
    START + bytes(99),
    bytes(512 - len(TWO)) + b'Oak","tag":"b',
    START.ljust(512 - len(TWO), b'\0') + b'x' * 512 + bytes(512) + b'y',
    b'\0\0\0\n\0\0',
]


@RUNNING
def test_torn_tail_is_cut_off(path, caplog, running):
    """Wherever an append ends, whole records survive and the torn tail is kept.

    A record that lacks only its line feed is whole. Readers change nothing.
    """
    text = lines(*PLANTS[2:])
    for end in [*(text[:size] for size in range(len(text) + 1)), *LOST]:
        whole = PLANTS[: 2 + (end + b'\n').count(b'}\n')]
        torn = end.removeprefix(lines(*whole[2:])[: len(end)])
        caplog.clear()
        with opened(path, running) as store:
            append(path, end)
            assert list(store) == whole
            assert bool(verify(path).damaged) == bool(torn)
            assert path.read_bytes() == TWO + end
            store.add(OAK)
            assert path.read_bytes() == lines(*whole, OAK)
            assert_stored(store, [*whole, OAK])
        # Told by the reader, and by the store with the name of the side file.
        assert caplog.text.count(f'{path}: a torn tail at byte') == 2 * bool(torn)
        assert ('plants.jsonl.torn-1' in caplog.text) == bool(torn)
        assert take_side_files(path) == [torn] * bool(torn)


def lost_block(start=512, end=1024):
    """Return a batch after two plants that has lost what is between two offsets."""
    batch = TWO + lines(*BATCH)
    return (batch[:start] + bytes(end - start) + batch[end:])[len(TWO) :]


IVY = b'{"id":3,"name":"Ivy"}'
# Ends that no crash of ours can have left: other programs and people write them.
FOREIGN = {
    'jq': IVY[:-1] + b',"tag":null}\n',
    'a line of an array': IVY + b',',
    'two on a line, torn': IVY + IVY[:9],
    'jq without its end': b'{\n  "id": 3,\n  "na',
    'members in another order': b'{"name":"Ivy","id":',
    'Latin-1': '{"id":3,"name":"Gräser'.encode('latin-1'),
    'UTF-16': IVY.decode().encode('utf-16-le'),
    'a cut that has a line feed': b'{"id":3,"name":"I\n',
    'a tab': b'{"id":3,\t"name":"I',
    'NULs within a block': START + bytes(9) + b'x',
    'a half, then more': b'{"id":3,"na\n{"id":4,"na',
    'lost within a block': lost_block(512, 1000),
    'lost from within a block': lost_block(600, 1030),
    'lost far from the end': lost_block() + 4 * lines(Plant(50, 'M' * 2**22)),
}


@RUNNING
@pytest.mark.parametrize('more', [b'', lines(OAK), b'{"id":7,"na'], ids=len)
@pytest.mark.parametrize('foreign', FOREIGN.values(), ids=FOREIGN)
def test_foreign_end_is_damage(path, running, foreign, more):
    """A start, a running server and a reader refuse it, and leave it alone."""
    if more and not foreign.endswith(b'\n'):
        more = b'\n' + more
    with opened(path, running) as store:
        append(path, foreign + more)
        for use in 2 * [partial(store.add, OAK), store.ping, store.load]:
            with pytest.raises(StoreCorrupt) as caught:
                use()
            before = (TWO + foreign)[: caught.value.offset]
            assert caught.value.line == 1 + before.count(b'\n')
            assert raw_plants(before)[:2] == PLANTS[:2]
        assert_raise(StoreCorrupt, partial(list, store))
    assert path.read_bytes() == TWO + foreign + more
    assert not take_side_files(path)


def test_lost_block_before_records_is_blanked(path, disk):
    """When a store opens: the records after it are kept, its line in a side file."""
    batch = lost_block(512, 2048) + lines(Plant(50, '榕' * 2**20))
    split = batch.splitlines(keepends=True)
    line = b''.join(each for each in split if b'\0' in each)
    sound = raw_plants(b''.join(each for each in split if b'\0' not in each))
    with opened(path, running=True) as store:
        append(path, batch)
        uses = partial(store.add, OAK), store.ping, partial(list, store)  # as verify()
        assert_raise(StoreCorrupt, *uses)
    assert path.read_bytes() == TWO + batch
    assert len(verify(path).damaged) == line.count(b'\n')
    disk.fdatasync = lambda fd: os.fdatasync(-1)  # it fails
    with JSONLinesStore(path) as store:
        assert_raise(StoreUnavailable, *[partial(store.add, OAK)] * 3)
    assert not take_side_files(path)
    del disk.fdatasync
    assert_stored(path, [*PLANTS[:2], *sound], free=[100])
    assert take_side_files(path) == [line]
    assert path.read_bytes().startswith(TWO + batch[: batch.index(line)])
    assert verify(path) == Verified(2 + len(sound) + 1)


PIECES = [
    *(b'\n', b'\r\n', b'  ', b'\0', bytes(512), bytes(512 - len(TWO)), b'\xff', b'"'),
    *(b'{"id":', b'{"id":3', b'{"id":3,"name":"x', b'"}', b'[]\n', b'null\n', b'{}\n'),
    *(lines(PLANTS[2]), lines(PLANTS[3]), lines(OAK)[:-1], b'x' * 512, b'hello'),
]


@RUNNING
@given(end=st.lists(st.sampled_from(PIECES), max_size=7).map(b''.join))
@example(end=lost_block())
@example(end=lines(PLANTS[2]) + b'{"id":3,"name":"x"}')
def test_no_record_and_no_byte_is_ever_lost(tmp_path_factory, running, end):
    """Whatever is at the end: a store refuses it untouched, or keeps all records."""
    path = tmp_path_factory.mktemp('end') / 'plants.jsonl'
    with opened(path, running) as store:
        append(path, end)
        content, records = path.read_bytes(), {yew := Plant(77, 'Yew')}
        for line in content.split(b'\n'):
            with contextlib.suppress(ValueError, TypeError):
                records.add(Plant(**json.loads(line)))
        try:
            store.add(yew)
            assert set(raw_plants(path.read_bytes())) == records
        except StoreCorrupt:  # what is NUL may be blank by then
            assert len(path.read_bytes()) == len(content)
        kept = b'\n'.join([*take_side_files(path), path.read_bytes()])
        for line in content.split(b'\n'):
            assert line in kept or not line.strip(b'\0 ')
        for plant in records - {yew}:
            assert lines(plant)[:-1] in kept


@RUNNING
def test_blank_lines_are_no_damage(path, running):
    """Every reader skips them, and a byte order mark at the start."""
    blank = b'\n', b' \t \n', b'\r\n', b' ' * 3_000_000 + b'\n'
    before = TWO if running else b'\xef\xbb\xbf\n' + TWO
    content = b''.join([before, *blank, lines(PLANTS[2]), b'\n  '])
    with opened(path, running) as store:
        path.write_bytes(content)
        assert list(store) == PLANTS[:3]
        assert verify(path).damaged == ()
        assert_stored(store, PLANTS[:3], free=[4])
    assert path.read_bytes() == content + b'\n' + lines(Plant(4, 'Free'))
    assert not take_side_files(path)


def test_opening_beside_one_that_cuts(path, disk, monkeypatch):
    """What is read without the lock is never a line that another process takes back."""
    monkeypatch.setattr(plant_file, 'NEAR', 8 * 2100)
    path.write_bytes((far := TWO + b'\n' * 20_000) + b'{"id":3,"name":"' + b'x' * 2000)
    # It writes a batch while its disk is full, takes that back, and writes another.
    steps = iter([lines(Plant(id, 'Elm' * 99), Plant(5, 'y' * 300)) for id in (6, 7)])

    def before(name, target, *arguments):
        with path.open('rb') as other, contextlib.suppress(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if name == 'pread' and arguments[0] > 1000:
                path.write_bytes(far + next(steps))

    disk.before = before
    with JSONLinesStore(path) as store:
        store.ping()
        disk.resume()
        for id in 6, 7:
            with contextlib.suppress(StoreUnavailable, IdTaken):
                store.add(Plant(id, 'Oak'))
    stored = raw_plants(path.read_bytes())
    assert len({plant.id for plant in stored}) == len(stored)


RIVAL = lines(PLANTS[0]._replace(name='Reed'))


@RUNNING
@pytest.mark.parametrize('damage', [RIVAL, (b'?' * 16_000 + b'\n') * 430], ids=len)
def test_damage_is_refused_until_it_is_repaired(path, disk, running, damage):
    """What follows it is kept and known; blanked lines are blank for every reader."""
    disk.stat = lambda path: os.stat_result(os.stat(path)[:10])  # without its ticks
    with opened(path, running) as store:
        append(path, lines(PLANTS[0]) + damage + lines(PLANTS[2]))
        assert_raise(StoreCorrupt, *2 * [partial(store.add, OAK), store.ping])
        assert verify(path, repair=True).repaired
        assert take_side_files(path) == [damage]
        assert verify(path) == Verified(4)
        assert_stored(store, PLANTS[:3], free=[OAK.id])
        assert_stored(path, [*PLANTS[:3], Plant(OAK.id, 'Free')])


def test_check_beside_a_server_confirms_damage(path):
    """A torn tail that a server mends meanwhile is no damage."""
    path.write_bytes(TWO + START)

    def progress(found):
        for line in found:
            if not line.offset:  # the others are read, and not yet looked at
                with JSONLinesStore(path) as store:
                    store.add_many(BATCH)
            yield line

    assert verify(path, progress=progress) == verify(path) == Verified(2 + len(BATCH))


@pytest.mark.parametrize('text', [b'hello\n', b'[\n' + lines(OAK) + b']\n'], ids=len)
def test_file_that_is_none_of_plants_is_left_alone(path, text):
    """A repair would take all of it for damage, or most of an array."""
    path.write_bytes(text)
    assert_raise(StoreCorrupt, JSONLinesStore(path).ping)
    for repair in False, True:
        check = partial(verify, path, repair=repair)
        assert_raise(StoreUnavailable, check, match='not a file of plants')
    assert path.read_bytes() == text
