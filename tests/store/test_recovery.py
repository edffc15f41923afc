"""Recovery: what a crash has left is mended, and all else that is no plant is refused.

No record is ever cut, and no byte is lost: it is in the file, or in a side file.
"""

import contextlib
import fcntl
import json
from functools import partial

import pytest
from disk import (
    append,
    assert_raise,
    assert_stored,
    files,
    lines,
    raw_plants,
    take_side_files,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from store import Plant, StoreCorrupt, StoreError, StoreUnavailable
from store.jsonl import JSONLinesStore
from store.jsonl.repair import Verified, verify

PLANTS = [
    Plant(1, 'Fern'),
    Plant(2, 'Moss', 'shade'),
    Plant(3, 'Gräser 🌱'),
    Plant(4, '"\\\n', ''),
    Plant(-5, 'Heide \u2028', 'Licht ☀'),
]
OAK = Plant(9, 'Oak')
TWO = lines(*PLANTS[:2])
BATCH = [Plant(id, 'Moss', 'y' * 100) for id in range(10, 40)]
RUNNING = pytest.mark.parametrize('running', [True, False], ids=['running', 'at-open'])


@contextlib.contextmanager
def opened(path, running, content=TWO):
    """Yield a store, which has a file open or not yet; the file has this content."""
    for file in path.parent.glob('plants*'):
        file.unlink()
    path.write_bytes(content)
    with JSONLinesStore(path) as store:
        if running:
            store.ping()
        yield store


@RUNNING
def test_append_that_ends_anywhere_loses_no_whole_record(path, caplog, running):
    """Wherever an append ends, whole records survive and the torn tail is kept.

    A record that lacks only its line feed is whole.
    """
    text = lines(*PLANTS)
    for end in range(len(TWO), len(text) + 1):
        whole = (text[:end] + b'\n').count(b'}\n')  # also without its line feed
        torn = text[:end].removeprefix(lines(*PLANTS[:whole])[:end])
        caplog.clear()
        with opened(path, running) as store:
            append(path, text[len(TWO) : end])
            assert list(store) == PLANTS[:whole]
            store.add(OAK)
            assert path.read_bytes() == lines(*PLANTS[:whole], OAK)
            assert_stored(store, [*PLANTS[:whole], OAK])
        # Told by the reader, and by the store with the name of the side file.
        assert caplog.text.count(f'{path}: a torn tail at byte') == 2 * bool(torn)
        assert ('plants.jsonl.torn-1' in caplog.text) == bool(torn)
        assert take_side_files(path) == [torn] * bool(torn)


START = b'{"id":3,"na'
# Ends that a crash can have left after the first two plants: a beginning of a record,
# lost blocks, or both.
TORN = {
    'beginning': START,
    'part of a character': b'{"id":3,"name":"Gr\xc3',
    'one byte': b'{',
    'lost to the end': bytes(99),
    'beginning, lost to the end': START + bytes(99),
    'lost to the end of a block': bytes(512 - len(TWO)),
    'lost, and a part of another record': bytes(512 - len(TWO)) + b'Oak","tag":"b',
    'lost twice': START.ljust(512 - len(TWO), b'\0') + b'x' * 512 + bytes(512) + b'y',
    'lost lines': b'\0\0\0\n\0\0',
    'of several blocks': bytes(10_240 - len(TWO)),
}


@RUNNING
@pytest.mark.parametrize('torn', TORN.values(), ids=TORN)
def test_torn_tail_is_cut_off(path, running, torn):
    """Its bytes are kept in a side file; the ids of the record are free."""
    with opened(path, running) as store:
        append(path, torn)
        assert list(store) == PLANTS[:2]
        assert verify(path).damaged
        assert path.read_bytes() == TWO + torn
        assert_stored(store, PLANTS[:2], free=[3])
    assert take_side_files(path) == [torn]
    assert verify(path) == Verified(3)


IVY = '{"id":3,"name":"Ivy"}'
# Ends that no crash of ours can have left: other programs and people write them.
FOREIGN = {
    'jq, pandas, polars, DuckDB': b'{"id":3,"name":"Ivy","tag":null}\n',
    'the same without its line feed': b'{"id":3,"name":"Ivy","tag":null}',
    'pandas with a missing value': b'{"id":3.0,"name":"Ivy"}\n',
    'jq -c of strings': b'{"id":"3","name":"Ivy"}\n',
    'a line of an array': f'{IVY},\n'.encode(),
    'the same without its line feed, ': f'{IVY},'.encode(),
    'an array': f'[{IVY}]\n'.encode(),
    'jq': b'{\n  "id": 3,\n  "name": "Ivy"\n}\n',
    'jq without its end': b'{\n  "id": 3,\n  "na',
    'members in another order': b'{"name":"Ivy","id":',
    'Latin-1': '{"id":3,"name":"Gräser"}\n'.encode('latin-1'),
    'Latin-1 without its line feed': '{"id":3,"name":"Gräser'.encode('latin-1'),
    'PowerShell >>': f'{IVY}\r\n'.encode('utf-16-le'),
    'PowerShell Out-File': f'\ufeff{IVY}\r\n'.encode('utf-16-le'),
    'UTF-16, big endian': f'\ufeff{IVY}\n'.encode('utf-16-be'),
    'UTF-32': f'{IVY}\n'.encode('utf-32-le'),
    'a byte order mark, of cat': f'\ufeff{IVY}\n'.encode(),
    'Excel': b'3;Ivy;\r\n',
    'a heading': b'id,name,tag\r\n3,Ivy,\r\n',
    'Python': b"{'id': 3, 'name': 'Ivy'}\n",
    'two on a line': f'{IVY}{IVY}\n'.encode(),
    'two on a line, torn': f'{IVY}{IVY[:9]}'.encode(),
    'a comment': f'{IVY} // new\n'.encode(),
    'no name': b'{"id":3}\n',
    'a value': b'3',
    'text': b'hello',
    'a conflict': b'<<<<<<< HEAD\n',
    'gzip': b'\x1f\x8b\x08\x00\x8c\x1d',
    'a cut that has a line feed': b'{"id":3,"name":"I\n',
    'a tab': b'{"id":3,\t"name":"I',
    'NULs within a block': START + bytes(9) + b'x',
    'a half, then more': b'{"id":3,"na\n{"id":4,"na',
}


@RUNNING
@pytest.mark.parametrize('more', [b'', lines(OAK), b'{"id":7,"na'], ids=len)
@pytest.mark.parametrize('foreign', FOREIGN.values(), ids=FOREIGN)
def test_foreign_end_is_damage(path, run, running, foreign, more):
    """A start, a running server and every command refuse it, and leave it alone."""
    if more and not foreign.endswith(b'\n'):
        more = b'\n' + more
    with opened(path, running) as store:
        append(path, foreign + more)
        uses = partial(store.add, OAK), store.ping, JSONLinesStore(path).load
        for use in 2 * uses:
            with pytest.raises(StoreCorrupt) as caught:
                use()
            assert (caught.value.line, caught.value.offset) == (3, len(TWO))
        plants = iter(store)
        assert [next(plants), next(plants)] == PLANTS[:2]
        assert_raise(StoreCorrupt, partial(next, plants))
    for command in ['list', path], ['check', path], ['copy', path, f'{path}-copy']:
        code, output, errors = run(*command)
        assert code == 1
        assert f'line 3 (byte {len(TWO)})' in output.decode() + '\n'.join(errors)
    (path.parent / f'{path.name}-copy').unlink(missing_ok=True)
    assert files(path) == {path.name: TWO + foreign + more}


def lost_block(start, lost=slice(512, 1024)):
    """Return a batch that begins at an offset of the file, with a lost block."""
    batch = bytearray(lines(*BATCH))
    where = range(*lost.indices(start + len(batch)))
    for at in where:
        batch[at - start] = 0
    return bytes(batch)


def destroyed(batch):
    """Return the lines that have lost bytes, and the plants of the others."""
    split = batch.splitlines(keepends=True)
    sound = b''.join(line for line in split if b'\0' not in line)
    return b''.join(line for line in split if b'\0' in line), raw_plants(sound)


@pytest.mark.parametrize(
    'lost', [slice(512, 1024), slice(1024, 1536), slice(512, 2048), slice(512, 3000, 1)]
)
def test_lost_block_before_records_is_blanked(path, lost):
    """When a store opens: the records after it are kept, its line in a side file."""
    lost = slice(lost.start, lost.stop // 512 * 512)
    batch = lost_block(len(TWO), lost)
    line, sound = destroyed(batch)
    assert sound
    path.write_bytes(TWO + batch)
    assert_raise(StoreCorrupt, partial(list, JSONLinesStore(path)))  # as verify()
    assert len(verify(path).damaged) == line.count(b'\n')
    assert_stored(path, [*PLANTS[:2], *sound], free=[100])
    assert take_side_files(path) == [line]
    assert path.read_bytes().startswith(TWO + batch[: batch.index(line)])
    assert verify(path) == Verified(2 + len(sound) + 1)


NOT_LOST = {
    'a running server': (True, lost_block(len(TWO))),
    'within a block': (False, lost_block(len(TWO), slice(512, 1000))),
    'from within a block': (False, lost_block(len(TWO), slice(600, 1030))),
    'far from the end': (
        False,
        lost_block(len(TWO)) + lines(*(Plant(id, 'M' * 10**5) for id in range(50, 62))),
    ),
}


@pytest.mark.parametrize(('running', 'content'), NOT_LOST.values(), ids=NOT_LOST)
def test_zeros_that_are_no_lost_block_are_damage(path, running, content):
    """Zeros that no crash can have left are damage: nothing is touched."""
    with opened(path, running) as store:
        append(path, content)
        assert_raise(StoreCorrupt, partial(store.add, OAK), store.ping)
    assert files(path) == {path.name: TWO + content}


PIECES = [
    *(b'\n', b'\r\n', b'  ', b'\0', bytes(512), bytes(512 - len(TWO)), b'\xff', b'"'),
    *(b'{"id":', b'{"id":3', b'{"id":3,"name":"x', b'"}', b'[]\n', b'null\n', b'{}\n'),
    *(lines(PLANTS[2]), lines(PLANTS[3]), lines(OAK)[:-1], b'x' * 512, FOREIGN['text']),
]


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
    """The path of a plant file for all examples."""
    return tmp_path_factory.mktemp('shared') / 'plants.jsonl'


@RUNNING
@settings(max_examples=150)
@given(end=st.lists(st.sampled_from(PIECES), max_size=7).map(b''.join))
@example(end=lost_block(len(TWO)))
def test_no_record_and_no_byte_is_ever_lost(shared, running, end):
    """Whatever is at the end: a store refuses it untouched, or keeps all records."""
    with opened(shared, running) as store:
        append(shared, end)
        content = shared.read_bytes()
        records = set()
        for line in content.split(b'\n'):
            with contextlib.suppress(ValueError, TypeError):
                records.add(Plant(**json.loads(line)))
        try:
            store.add(yew := Plant(77, 'Yew'))
            records.add(yew)
            assert set(raw_plants(shared.read_bytes())) == records
        except StoreCorrupt:  # what is NUL may be blank by then
            assert len(shared.read_bytes()) == len(content)
        kept = b'\n'.join([*take_side_files(shared), shared.read_bytes()])
        for line in content.split(b'\n'):
            assert line in kept or not line.strip(b'\0 ')
        for plant in records:
            assert lines(plant)[:-1] in kept


@RUNNING
def test_blank_lines_are_no_damage(path, running):
    """Every reader skips them, wherever they are, also at the end of the file."""
    blank = b'\n', b' \t \n', b'\r\n', b' ' * 3_000_000 + b'\n'
    content = b''.join([blank[0], TWO, *blank, lines(PLANTS[2]), b'\n  '])
    with opened(path, running) as store:
        if running:
            content = TWO + content
        path.write_bytes(content)
        assert sorted({*store}) == sorted(PLANTS[:3])
        assert verify(path).damaged == ()
        assert_stored(store, PLANTS[:3], free=[4])
    assert path.read_bytes() == content + b'\n' + lines(Plant(4, 'Free'))
    assert not take_side_files(path)


def test_byte_order_mark_at_the_start(path, caplog):
    """It is read over, and told by a check; plants are added behind it."""
    path.write_bytes(b'\xef\xbb\xbf' + TWO)
    with JSONLinesStore(path) as store:
        assert list(store) == PLANTS[:2]
        assert_stored(store, PLANTS[:2], free=[3])
    assert path.read_bytes() == b'\xef\xbb\xbf' + TWO + lines(Plant(3, 'Free'))
    assert verify(path) == Verified(3)
    assert 'byte order mark' in caplog.text


WRONG = {
    'text': b'hello\nworld\n',
    'a table': b'id,name\n1,Fern\n',
    'an array': b'[{"id":1,"name":"Fern"},\n' + lines(PLANTS[1]) + b']\n',
    'UTF-16': f'\ufeff{IVY}\r\n'.encode('utf-16-le'),
    'no plant': b'{"id":1}\n{"name":"Fern"}\n',
    'unfinished, not by us': b'{"id":\t1,"name":"Fern"',
}


@RUNNING
@pytest.mark.parametrize('repair', [False, True])
@pytest.mark.parametrize('content', WRONG.values(), ids=WRONG)
def test_file_that_is_none_of_plants_is_left_alone(path, content, running, repair):
    """A file in which no line is a plant, or an array, is refused; also by a repair."""
    with opened(path, running, b'') as store:
        append(path, content)
        uses = partial(store.add, OAK), store.ping, partial(verify, path, repair=repair)
        assert_raise(StoreUnavailable, *uses, match='not a file of plants')
        assert_raise(StoreError, partial(list, store))
    assert files(path) == {path.name: content}


def test_opening_beside_one_that_cuts(path, disk):
    """What is read without the lock is never a line that another process takes back."""
    path.write_bytes(TWO + b'{"id":3,"name":"' + b'x' * 2000)
    # It writes a batch while its disk is full, takes that back, and writes another.
    steps = iter([lines(Plant(id, 'Elm' * 99), Plant(5, 'y' * 300)) for id in (6, 7)])

    def before(name, target, *arguments):
        with path.open('rb') as other, contextlib.suppress(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if name == 'pread' and arguments[0] > 1000:
                path.write_bytes(TWO + next(steps))

    disk.before = before
    with JSONLinesStore(path) as store:
        store.ping()
        disk.resume()
        for id in 6, 7:
            with contextlib.suppress(StoreUnavailable):
                store.add(Plant(id, 'Oak'))
    stored = raw_plants(path.read_bytes())
    assert len({plant.id for plant in stored}) == len(stored)
