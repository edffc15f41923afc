"""Recovery: a plant file after a crash or an edit is cut, refused or accepted."""

import contextlib
import errno
import logging
import os
import shutil
import time
from functools import partial

import pytest
from disk import (
    Fault,
    append,
    assert_raise,
    assert_stored,
    failing,
    files,
    fill,
    index_of,
    lines,
    path_of,
    take_side_files,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from store import IdTaken, Plant, StoreCorrupt, StoreError, StoreUnavailable
from store.jsonl import JSONLinesStore, record, recovery
from store.jsonl.file import FLUSH_WITHIN
from store.jsonl.index import LOOK_WITHIN
from store.jsonl.record import LONGEST
from store.jsonl.repair import Verified, verify

PLANTS = [
    Plant(1, 'Fern'),
    Plant(2, 'Moss', 'shade'),
    Plant(3, 'Gräser 🌱'),
    Plant(4, '"\\\n', ''),
    Plant(-5, 'Heide \u2028', 'Licht ☀'),
]
OAK = Plant(9, 'Oak')
LENGTH = len(lines(*PLANTS))
BATCH = [Plant(id, 'Moss', 'y' * 100) for id in range(10, 40)]
RUNNING = pytest.mark.parametrize('running', [True, False], ids=['running', 'at-open'])


def uses(store):
    """Return the calls that refuse a file; those of an open store first."""
    add = partial(store.add, PLANTS[4]._replace(name='Reed'))
    return store.ping, add, store.check_opening, partial(list, store)


def everything(directory):
    """Return what is in a directory, with the content of files."""
    return {it: it.is_file() and it.read_bytes() for it in directory.rglob('*')}


@contextlib.contextmanager
def opened(path, running, content):
    """Yield a store, which has a file open or not yet; the file has this content."""
    for file in path.parent.glob('plants*'):
        file.unlink()
    path.write_bytes(content)
    with JSONLinesStore(path) as store:
        if running:
            store.ping()
        yield store


# Any combination of these contains no line that is a record.
PIECES = [
    *(b'\n', b'\r\n', b'\0', bytes(600), b'\xff', '🌱'.encode()[:3], b'{', b'}', b'"'),
    *(b'[]\n', b'{}\n', b'null\n', b'{"id":3}\n', b'{"name":"Ivy"}\n', b'{"id":'),
    *(b'{"id":"3","name":"Ivy"}\n', b'{"id":3,"name":"Ivy","tag":null}\n'),
    *(b'{"id":3.0,"name":"Ivy"}\n', b'{"id":true,"name":"Ivy"}\n'),
]
MORE = st.integers(0, 2)
GARBAGE = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(b''.join)


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
    """The path of a plant file for all examples."""
    return tmp_path_factory.mktemp('shared') / 'plants.jsonl'


class TestCut:
    @RUNNING
    def test_append_that_ends_anywhere_loses_no_whole_record(
        self, path, caplog, running
    ):
        """Wherever an append ends, whole records survive and the torn tail is kept."""
        text = lines(*PLANTS)
        sound = lines(*PLANTS[:2])
        for end in range(len(sound), len(text) + 1):
            whole = (text[:end] + b'\n').count(b'}\n')  # also without its line feed
            torn = text[:end].removeprefix(lines(*PLANTS[:whole])[:end])
            caplog.clear()
            with opened(path, running, sound) as store:
                append(path, text[len(sound) : end])
                store.add(OAK)
                assert path.read_bytes() == lines(*PLANTS[:whole], OAK)
                assert_stored(store, [*PLANTS[:whole], OAK])
            warned = '\n'.join(caplog.messages)
            assert bool(warned) == bool(torn)
            assert 'the index is opened again' not in warned
            if torn:
                assert f'{path}: removed {len(torn)} bytes' in warned
                assert f'at byte {len(lines(*PLANTS[:whole]))}' in warned
                assert 'a copy is in plants.jsonl.torn-1' in warned
            assert take_side_files(path) == [torn] * bool(torn)

    @pytest.mark.parametrize('place', range(0, len(lines(PLANTS[4])) - 1, 3))
    def test_damaged_last_line_is_no_torn_tail(self, path, place):
        """A damaged last line is no torn tail if it was synced."""
        fill(path, *PLANTS[:3], PLANTS[4])
        text = bytearray(path.read_bytes())
        text[len(lines(*PLANTS[:3])) + place] = 0
        path.write_bytes(text)
        with JSONLinesStore(path) as store:
            uses = 2 * [partial(store.add, OAK)]
            assert_raise(StoreCorrupt, *uses, match='it was acknowledged')
        assert path.read_bytes() == text

    @RUNNING
    @settings(max_examples=30)
    @given(garbage=GARBAGE, more=MORE)
    def test_garbage_at_the_end_is_cut_off(self, shared, running, garbage, more):
        survivors = PLANTS[: 2 + more]
        with opened(shared, running, lines(*PLANTS[:2])) as store:
            append(shared, lines(*PLANTS[2 : 2 + more]) + garbage)
            store.add(OAK)
            assert shared.read_bytes() == lines(*survivors, OAK)
            assert_stored(store, [*survivors, OAK], free=[100])
        assert take_side_files(shared) == [garbage]

    @RUNNING
    @settings(max_examples=30)
    @given(garbage=GARBAGE, more=MORE)
    def test_garbage_before_a_record_is_refused(self, shared, running, garbage, more):
        before = lines(*PLANTS[: 2 + more])
        with opened(shared, running, lines(*PLANTS[:2])) as store:
            text = before + garbage + b'\n' + lines(PLANTS[4]) + b'torn'
            shared.write_bytes(text)
            for _ in range(2):
                with pytest.raises(StoreCorrupt) as caught:
                    store.add(OAK)
                line = before.count(b'\n') + 1
                assert (caught.value.line, caught.value.offset) == (line, len(before))
                place = f'{shared}: line {line} (byte {len(before)})'
                assert place in str(caught.value)
            plants = iter(store)
            assert [next(plants) for _ in range(2 + more)] == PLANTS[: 2 + more]
            assert_raise(StoreCorrupt, partial(next, plants))
        assert shared.read_bytes() == text
        assert not take_side_files(shared)

    @RUNNING
    def test_line_repaired_in_place_is_read(self, path, running):
        damage = b'{"id":3,"name":"Ivy"\n'
        with opened(path, running, lines(PLANTS[0])) as store:
            append(path, damage + lines(PLANTS[1]))
            assert_raise(StoreCorrupt, partial(store.add, OAK))
            text = path.read_bytes().replace(damage, b'{"id":3,"name":"Iv"}\n')
            with path.open('r+b') as file:
                file.write(text)
            assert_stored(store, [*PLANTS[:2], Plant(3, 'Iv')], free=[100])

    @pytest.mark.parametrize('reopen', [True, False], ids=['reopened', 'same-store'])
    def test_ids_cut_off_with_damage_are_free(self, path, reopen):
        with opened(path, True, lines(*PLANTS[:2])) as store:
            size = path.stat().st_size
            append(path, lines(*PLANTS[2:4]) + b'?\n' + lines(PLANTS[4]))
            assert_raise(StoreCorrupt, partial(store.add, OAK))
            os.truncate(path, size)
            if reopen:
                store.close()
            # Longer plants first, so that no line begins where one began before.
            others = [Plant(id, 'x' * 90) for id in range(20, 24)]
            with JSONLinesStore(path) if reopen else store as user:
                for plant in (*others, *reversed(PLANTS)):
                    user.add(plant)
                assert_stored(user, [*others, *PLANTS], free=[OAK.id])

    def test_interrupt_after_a_cut_keeps_the_side_file(self, path, disk):
        """A side file is durable before the cut, also if its sync is interrupted."""
        path.write_bytes(lines(PLANTS[0]) + b'torn')
        steps = []

        def interrupt(name, target, *arguments):
            steps.append(f'{name} {path_of(target)}')
            if steps[-2:] == [f'ftruncate {path}', f'fdatasync {path}']:
                raise KeyboardInterrupt

        disk.before = interrupt
        with pytest.raises(StoreUnavailable, match='KeyboardInterrupt'):
            JSONLinesStore(path).add(OAK)
        kept = [f'fsync {path}.torn-1', f'open {path.parent}', f'fsync {path.parent}']
        assert steps[-5:-2] == kept
        assert path.read_bytes() == lines(PLANTS[0])
        assert take_side_files(path) == [b'torn']

    def test_iteration_skips_a_torn_tail(self, path, caplog):
        text = lines(*PLANTS) + b'torn'
        path.write_bytes(text)
        with JSONLinesStore(path) as store:
            assert list(store) == PLANTS
        assert f'{path}: a torn tail at byte {len(lines(*PLANTS))}' in caplog.text
        assert files(path) == {path.name: text}

    @RUNNING
    @pytest.mark.parametrize('beginning', [1, 6, 8, 20])
    def test_beginning_of_the_first_line_is_cut_off(self, path, running, beginning):
        """The beginning of a first record, perhaps before zeros, is a torn tail."""
        for torn in lines(*PLANTS)[:beginning], lines(*PLANTS)[:beginning] + bytes(99):
            with opened(path, running, b'') as store:
                append(path, torn)
                assert_stored(store, [], free=[1])
            assert take_side_files(path) == [torn]


class TestShortened:
    """A file that is shorter than an end that was synced is refused by everybody."""

    @pytest.mark.parametrize('end', [0, 1, 60, LENGTH - 2])
    def test_file_cut_short_while_stopped(self, path, end):
        """A file that was cut short is refused until it is back; nothing is changed."""
        fill(path, *PLANTS)
        text = path.read_bytes()
        os.truncate(path, end)
        reason = f'cut short: {len(text) - end} bytes at its end are missing'
        for create in 'always', 'first', 'never':
            with JSONLinesStore(path, create=create) as store:
                assert_raise(StoreUnavailable, *uses(store), match=reason)
        assert path.read_bytes() == text[:end]
        with path.open('r+b') as file:
            file.write(text)
        assert_stored(path, PLANTS, free=[100])

    @pytest.mark.parametrize('end', [1, 2, 3, 4])
    def test_file_cut_short_is_noticed_by_an_idle_process(self, path, monkeypatch, end):
        """A process refuses a file without lines that it or the index knows."""
        assert FLUSH_WITHIN == LOOK_WITHIN == 1  # the mark is young
        monkeypatch.setattr('store.jsonl.file.FLUSH_WITHIN', 100)
        monkeypatch.setattr('store.jsonl.index.LOOK_WITHIN', 0)
        with JSONLinesStore(path) as store, JSONLinesStore(path) as other:
            store.add_many(PLANTS[:2])
            assert other.add(PLANTS[0]) is False  # it knows two lines
            if end > 1:
                store.add_many(PLANTS[2:5])
                wait_until(store._backend()._index.flush)
            text = lines(*PLANTS[:end])
            os.truncate(path, len(text))
            assert_raise(StoreUnavailable, *uses(other)[:2], match='cut short')
            if end > 1:
                refused = partial(assert_raise, StoreUnavailable, match='cut short')
                refused(*uses(JSONLinesStore(path)))
        assert path.read_bytes() == text

    @pytest.mark.parametrize('end', [0, 60, len(lines(*PLANTS[:3]))])
    def test_repair_accepts_the_loss(self, path, end):
        """A check says how much is missing; with a repair the rest is served again."""
        fill(path, *PLANTS)
        missing = path.stat().st_size - end
        os.truncate(path, end)
        whole = path.read_bytes().count(b'\n')
        for repair in False, True:
            found = verify(path, repair=repair)
            assert f'{missing} bytes at its end are missing' in found.damaged[-1]
            assert bool(found.repaired) == repair
        assert verify(path) == Verified(whole)
        assert_stored(path, PLANTS[:whole], free=[4, -5])

    def test_last_line_feed_may_be_missing(self, path):
        """An editor that drops the last line feed loses no plant."""
        fill(path, *PLANTS)
        os.truncate(path, path.stat().st_size - 1)
        assert_stored(path, PLANTS)
        path.write_bytes(path.read_bytes().replace(b'Fern', b'Fer'))
        with JSONLinesStore(path) as store:
            assert_raise(StoreUnavailable, *uses(store), match='cut short: 1 bytes')


WRONG = {
    'byte-order-mark': b'\xef\xbb\xbf' + lines(*PLANTS),
    'no-ids-in-one-line': b'{"name":"Fern"}',
    'tab-in-one-line': b'{"id":\t1,"name":"Fern"',
}


NOT_TORN = {
    'more': (b'{"id":7,"name":"' + b'x' * 1000, 'more follows than an unfinished'),
    'plant': (b'{"id":7,"name":"%b"}\n' % (b'x' * LONGEST), f'{record.TOO_LONG};'),
}


class TestWrongFile:
    @RUNNING
    @pytest.mark.parametrize('content', WRONG.values(), ids=WRONG)
    def test_wrong_file_is_refused(self, path, content, running):
        """A file without a plant in its first line is refused, and left as it is."""
        with opened(path, running, b'') as store:
            append(path, content)
            assert_raise(StoreError, *uses(store))
        assert path.read_bytes() == content
        assert all('.index' in name for name in files(path) if name != path.name)

    @RUNNING
    @pytest.mark.parametrize(('end', 'reason'), NOT_TORN.values(), ids=NOT_TORN)
    def test_end_that_no_crash_has_left_is_not_cut_off(
        self, path, running, monkeypatch, end, reason
    ):
        """More than one write, or a plant of an earlier version, is no torn tail."""
        monkeypatch.setattr(recovery, 'MOST_TORN', 1000)
        with opened(path, running, lines(*PLANTS)) as store:
            append(path, end)
            assert_raise(StoreCorrupt, partial(store.add, OAK), match=reason)
        assert path.read_bytes() == lines(*PLANTS) + end


class TestSwap:
    @pytest.mark.parametrize('other', ['copy', 'directory', 'no directory'])
    def test_changed_file_is_refused_until_restored(self, tmp_path, other):
        path = tmp_path / 'own' / 'plants.jsonl'
        path.parent.mkdir()
        moved = path.parent if other == 'no directory' else path
        with JSONLinesStore(path) as store:
            store.add_many(PLANTS[:3])
            away = moved.rename(moved.with_name('away'))
            if other == 'copy':
                shutil.copy2(away, path)
            elif other == 'directory':
                path.mkdir()
            before = everything(tmp_path)
            for plant in PLANTS[0], PLANTS[3], PLANTS[0]._replace(name='Reed'):
                add, refused = partial(store.add, plant), 'the file (is gone|was rep)'
                assert_raise(StoreUnavailable, add, store.ping, match=refused)
            assert everything(tmp_path) == before
            if other == 'directory':
                path.rmdir()
            away.rename(moved)
            store.ping()
            store.add(PLANTS[3])
            assert_stored(store, PLANTS[:4], free=[100])
        assert path.read_bytes() == lines(*PLANTS[:4], Plant(100, 'Free'))

    @pytest.mark.parametrize('flushed', [False, True], ids=['recent', 'flushed'])
    @pytest.mark.parametrize('longer', [1, 40], ids=['little', 'much'])
    def test_overwritten_file_gives_no_id_twice(
        self, path, longer, flushed, monkeypatch
    ):
        monkeypatch.setattr('store.jsonl.file.FLUSH_WITHIN', 100)
        before = [Plant(id, 'Fern') for id in range(10)]
        after = [Plant(id, 'Moss') for id in range(50, 60 + longer)]
        with JSONLinesStore(path) as store:
            for plant in before:
                store.add(plant)
            if flushed:
                fill(path)  # its close enters all ids into the table
            path.write_bytes(lines(*after))
            for plant in after:
                with contextlib.suppress(StoreUnavailable):
                    store.add(plant)
                with pytest.raises((IdTaken, StoreUnavailable)):
                    store.add(plant._replace(name='Reed'))
        assert path.read_bytes() == lines(*after)
        assert_stored(path, after, free=range(10))


def test_long_build_logs_its_progress(path, monkeypatch, caplog):
    """A long build of an index logs how much of the file is read."""
    path.write_bytes(lines(OAK))
    monkeypatch.setattr(recovery, 'PROGRESS_EVERY', -1)
    caplog.set_level(logging.INFO)
    fill(path)
    assert f'{path}: building the index: there is none' in caplog.messages
    assert f'{path}: 100 % of 0 MiB read, 0 s' in caplog.messages


def test_probe_does_what_an_add_does(path, disk):
    """A process that has met no failed write is not ready while writes fail."""
    with JSONLinesStore(path) as store:
        store.add(PLANTS[0])
        disk.before = Fault('pwrite', 1, failing(errno.EROFS), lasting=True)
        assert_raise(StoreUnavailable, store.ping, match='Read-only file system')
        disk.resume()
        index_of(path, '-lock').unlink()  # as an operator may
        store.ping()
        disk.calls.clear()
        index_of(path, '-lock').write_bytes(b'left')  # no room that is there counts
        store.ping()
        done = [name for name, *_ in disk.calls if name in ('ftruncate', 'pwrite')]
        assert done == ['ftruncate', 'pwrite', 'ftruncate']
        assert not disk.calls_on(path)
    assert index_of(path, '-lock').read_bytes() == b''
    assert path.read_bytes() == lines(PLANTS[0])


@pytest.mark.parametrize('blocks', [2, 2 * LONGEST // 512], ids=['short', 'long'])
@pytest.mark.parametrize('place', [0, 1, 511, 512, 513, 1500])
def test_lost_block_of_an_unsynced_batch_is_cut_off(path, place, blocks):
    """A lost block goes to a side file; the acknowledged lines before it stay."""
    known = Plant(1, 'Fern', 'x' * place)
    fill(path, known)
    # Zeros from the synced end to the end of a block.
    start = len(lines(known))
    lost = (start // 512 + blocks) * 512 - start
    torn = bytes(lost) + lines(*BATCH)[min(lost, 1024) :]
    append(path, torn)
    JSONLinesStore(path).check_opening()
    assert_stored(path, [known], free=[10, 39])
    assert take_side_files(path) == [torn]


@pytest.mark.parametrize(
    ('synced', 'end', 'running'),
    [
        (True, 1024, False),
        (False, 1000, False),
        (False, 1024, True),
        (None, 512, False),
    ],
    ids=['synced', 'within-a-block', 'running', 'no-index'],
)
def test_zeros_that_are_no_lost_block_are_damage(path, synced, end, running):
    """Zeros that no crash can have left are damage: nothing is touched."""
    text = bytes(end) + lines(*BATCH)[end:]
    fill(path, *BATCH * bool(synced))
    if synced is None:
        index_of(path).unlink()
    with JSONLinesStore(path) as store:
        if running:
            store.ping()
        path.write_bytes(text)
        assert_raise(StoreCorrupt, partial(store.add, OAK))
    assert path.read_bytes() == text


def test_damage_that_is_gone_is_told(path, monkeypatch):
    """Where a program that ignores the lock changes the file, no line is skipped."""

    def find_damage(chunk, start):
        yield 1, start
        raise record.DamagedRecord(record.NOT_JSON)

    path.write_bytes(lines(*PLANTS))
    monkeypatch.setattr(record, 'scan_ids', find_damage)
    store = JSONLinesStore(path)
    assert_raise(StoreUnavailable, store.ping, match='another program changes the file')


@pytest.mark.parametrize('ending', [b'', b'\n'], ids=['torn', 'damaged'])
@pytest.mark.parametrize('byte', [b'x', b'\0'], ids=['text', 'zeros'])
def test_time_of_a_long_line_is_linear(path, monkeypatch, byte, ending):
    """A long line is read in time proportional to its length."""
    monkeypatch.setattr(recovery, 'CHUNK', 1024)
    path.write_bytes(lines(PLANTS[0]) + 12_000_000 * byte + ending)
    began = time.process_time()
    with JSONLinesStore(path) as store:
        store.add(OAK)
    # Appending 1 KiB pieces one by one would copy 72 GB.
    assert time.process_time() - began < 5
    assert path.read_bytes() == lines(PLANTS[0], OAK)
