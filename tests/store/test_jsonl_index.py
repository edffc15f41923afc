"""The index of a plant file: it is disposable, and never gives an id twice."""

import errno
import fcntl
import itertools
import logging
import os
import random
import shutil
import sqlite3
from contextlib import closing, contextmanager, suppress
from random import Random
from unittest import mock

import pytest
from disk import (
    append,
    assert_raise,
    assert_stored,
    failing,
    fill,
    index_of,
    lines,
    mark_of,
    wait_for_flush,
)
from machine import locked
from waiting import in_child, in_threads, wait_until

from store import IdTaken, Plant, StoreCorrupt, StoreUnavailable
from store.jsonl import JSONLinesStore, file, index, recovery, table
from store.jsonl.repair import Verified, verify

pytestmark = pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')

TABLE = '', '-wal', '-shm'


def ferns(*span):
    """Return plants with scattered ids, the same for the same numbers."""
    return [Plant(hash((number, 7)) >> 1, f'Fern {number}') for number in range(*span)]


@pytest.fixture
def frequent(monkeypatch):
    """Flush soon after each add, with a checkpoint after some flushes."""
    monkeypatch.setattr(file, 'FLUSH_WITHIN', 0.01)
    monkeypatch.setattr(table, 'CHECKPOINT_PAGES', 25)


@contextmanager
def stopped(path, plants, state):
    """Yield a store that has plants, or had them before it stopped or was killed."""

    def add():
        store.add_many(plants[:-2])
        wait_for_flush(path)
        for plant in plants[-2:]:
            store.add(plant)  # its id is not in the table

    with JSONLinesStore(path) as store:
        if state == 'killed':
            in_child(add)
        else:
            add()
            if state == 'stopped':
                store.close()
        yield JSONLinesStore(path) if state == 'stopped' else store


def table_files(path):
    """Return the files of the table of an index that exist."""
    paths = (index_of(path, suffix) for suffix in TABLE)
    return [path for path in paths if path.exists()]


def removed(path, chance=None):
    """Remove the table."""
    for part in table_files(path):
        part.unlink()


def some_removed(path, chance):
    """Remove some files of the index."""
    for part in chance.sample(list(path.parent.glob('*.index*')), 2):
        part.unlink()


def of_another_file(path, chance):
    """Replace the index by that of another plant file."""
    removed(path)
    fill(path.with_name('other'), Plant(5, 'Other'))
    index_of(path.with_name('other')).replace(index_of(path))


def replaced_by(content):
    """Return a function that replaces the index by some bytes."""

    def replace(path, chance):
        removed(path)
        index_of(path).write_bytes(content)

    return replace


def rewritten(change):
    """Return a function that changes the content of the files of the table."""

    def rewrite(path, chance):
        for part in table_files(path):
            part.write_bytes(change(part.read_bytes()))

    return rewrite


LOSSES = (
    *(removed, some_removed, of_another_file, replaced_by(Random(0).randbytes(9000))),
    replaced_by(b'plants.jsonl index 3\n'),  # as of version 1.1
)
# Emptied, with zeros in each page but the first, and cut in the middle of a page.
DAMAGES = (
    rewritten(lambda content: b''),
    rewritten(lambda content: content[:4096].ljust(len(content), b'\0')),
    rewritten(lambda content: content[: len(content) // 2 + 100]),
)
STATES = 'stopped', 'killed', 'running'
SPOILED = *itertools.product(LOSSES, STATES), *itertools.product(DAMAGES, STATES[:2])


class TestSpoiled:
    @pytest.mark.parametrize(('spoil', 'state'), SPOILED)
    def test_spoiled_index_gives_no_id_twice(self, path, frequent, state, spoil):
        """An index may be lost at any time, and be damaged while nobody uses it."""
        plants = ferns(400)
        for seed in range(2 if spoil is some_removed else 1):
            with stopped(path, plants, state) as store, store:
                spoil(path, Random(seed))
                assert_stored(store, plants, free=[seed])
            assert mark_of(path) == path.stat().st_size  # there is a new one
            plants.append(Plant(seed, 'Free'))
            assert_stored(path, plants)

    def test_table_that_goes_back_is_not_believed(self, path, frequent):
        """A table that is as it was before, under an open store, gives no id twice."""
        fern, moss = Plant(1, 'Fern'), Plant(2, 'Moss')
        with JSONLinesStore(path) as store:
            store.add(fern)
            wait_for_flush(path)
            with closing(sqlite3.connect(index_of(path))) as other:
                before = other.execute('SELECT mark, tail FROM state').fetchone()
                store.add(moss)
                wait_for_flush(path)
                store.ping()  # a look: ids of the table are not kept any more
                with other:
                    other.execute('DELETE FROM plants WHERE id = 2')
                    other.execute('UPDATE state SET mark = ?, tail = ?', before)
            assert_stored(store, [fern, moss])

    def test_reason_shows_no_path(self, path, monkeypatch):
        """A client learns that the index cannot be read, and not where it is."""
        monkeypatch.setattr(index, 'LOOK_WITHIN', 0)
        error = OSError(errno.EIO, os.strerror(errno.EIO), index_of(path))
        failing = mock.patch.object(index.Index, '_check_inodes', side_effect=error)
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
            with failing, pytest.raises(StoreUnavailable) as caught:
                store.add(Plant(2, 'Moss'))
        assert caught.value.reason == 'the index: Input/output error'


UNEDITED = [Plant(number, 'Fern', 'x' * 40) for number in range(100, 200)]
EDITED = UNEDITED[0]._replace(id=999)


def edit(path):
    """Edit the first line of UNEDITED in place."""
    path.write_bytes(path.read_bytes().replace(b'"id":100,', b'"id":999,', 1))


WILD = [f'plants SET offset = {wild}' for wild in (-1, 2**63 - 1, 0.5, "'x'")]
WILD.append('state SET mark = -9')


class TestBuilt:
    def test_open_reads_only_lines_behind_the_mark(self, path, rebuilt):
        """A clean close leaves the mark at the end: the next open builds nothing."""
        fill(path, *ferns(300))
        assert not rebuilt()
        assert mark_of(path) == path.stat().st_size
        assert table_files(path) == [index_of(path)]
        with JSONLinesStore(path) as store:
            assert_stored(store, ferns(300), free=[1])
            append(path, lines(Plant(2, 'Moss')))  # by a process that is killed then
        assert_stored(path, [*ferns(300), Plant(2, 'Moss')])
        assert not rebuilt()

    def test_index_far_behind_is_built_again(self, path, rebuilt, monkeypatch):
        """So many lines behind the mark would take memory; a check builds it, too."""
        monkeypatch.setattr(recovery, 'MOST_BEHIND', 100)
        with JSONLinesStore(path) as store:
            store.ping()
            append(path, lines(*ferns(101)))
            assert_stored(store, ferns(101))
            assert rebuilt()
            store.add(Plant(1, 'Fern'))
            wait_for_flush(path)  # it says that the index is in use
            other = ferns(1)[0]._replace(tag='another')
            append(path, lines(*ferns(101, 202), other))
            index_of(path, '-new').touch()  # by a process that builds it
            assert_raise(StoreCorrupt, JSONLinesStore(path).check_opening)
            assert verify(path).damaged
            assert index_of(path, '-new').exists()

    @pytest.mark.parametrize('first', [0, 30, 250, 299])
    def test_two_plants_with_one_id_are_refused(self, path, monkeypatch, first):
        """A repeated line is accepted; another plant with its id is damage to all."""
        monkeypatch.setattr(recovery, 'CHUNK', 5000)  # bytes of about 100 lines
        plants = ferns(300)
        path.write_bytes(lines(plants[first % 299], *plants[:-1]))
        with JSONLinesStore(path) as running, JSONLinesStore(path) as not_open:
            assert_stored(running, plants[:-1])
            append(path, lines(plants[-1]))
            text = path.read_bytes()
            append(path, lines(plants[first]._replace(tag='another')))
            for store in running, not_open, JSONLinesStore(path):
                with pytest.raises(StoreCorrupt, match='different plant') as caught:
                    store.ping()
                place = caught.value.path, caught.value.line, caught.value.offset
                assert place == (str(path), 302, len(text))
                if store is not_open:
                    removed(path)  # the next one builds it
        assert not index_of(path, '-new').exists()

    @pytest.mark.parametrize('how', ['in place', 'and added to', 'a copy'])
    def test_edited_file_is_indexed_again(self, path, tmp_path, how):
        """A line that was edited while stopped is found, also in an older copy."""
        fill(path, *UNEDITED)
        more = [Plant(7, 'Moss')] * (how == 'and added to')
        copy = shutil.copy2(path, tmp_path / 'copy')
        edit(copy if how == 'a copy' else path)
        if how == 'a copy':
            shutil.copystat(path, copy)
            os.replace(copy, path)
        else:
            append(path, lines(*more))
            os.utime(path, ns=(1, 1))  # the clock may be too coarse to differ
        assert_stored(path, [EDITED, *UNEDITED[1:], *more], free=[100])

    def test_line_edited_before_the_mark_is_found(self, path, frequent):
        with stopped(path, UNEDITED, 'killed') as store, store:
            path.write_bytes(path.read_bytes().replace(b'"id":197,', b'"id":999,'))
            assert_stored(store, [EDITED, *UNEDITED[:-3], *UNEDITED[-2:]], free=[197])

    @pytest.mark.parametrize('repair', [True, False], ids=['repaired', 'unnoticed'])
    def test_index_with_a_wrong_entry_is_built_again(self, path, frequent, repair):
        """Whoever sees that an index is not that of the file has it built again."""
        with stopped(path, UNEDITED, 'killed') as store, store:
            edit(path)
            if repair:
                (sentence,) = verify(path).damaged
                assert sentence == f'{index_of(path)}: 1 ids differ from the file'
                assert verify(path, repair=True).repaired
            assert store.add(Plant(100, 'Moss'))
            assert_stored(store, [EDITED, *UNEDITED[1:], Plant(100, 'Moss')])

    @pytest.mark.parametrize('update', WILD)
    def test_value_that_no_file_can_have(self, path, frequent, update):
        """An index with a wild value is built again, also for a repeated line."""
        for id, repeat in (3, b''), (4, lines(Plant(4, 'Fern'))):
            with JSONLinesStore(path) as store:
                store.add_many([Plant(number, 'Fern') for number in range(5)])
                wait_for_flush(path)
                with closing(sqlite3.connect(index_of(path))) as other, other:
                    other.execute(f'UPDATE {update}')
                append(path, repeat)
                with pytest.raises(IdTaken):
                    store.add(Plant(id, 'Moss'))

    def test_check_beside_a_flush_finds_no_damage(self, path, frequent, monkeypatch):
        """No check, no list calls a file too short that grows beside it."""
        whole_size = recovery.whole_size

        def add_and_flush(*arguments):
            size = whole_size(*arguments)
            store.add(Plant(size, 'Fern'))
            wait_for_flush(path)
            return size

        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
            wait_for_flush(path)
            append(path, lines(*ferns(5)))
            monkeypatch.setattr(recovery, 'whole_size', add_and_flush)
            JSONLinesStore(path).check_opening()
            assert verify(path) == Verified(7)
            assert len(list(store)) == 9  # a check asks twice


class TestFlush:
    def test_processes_flush_at_once(self, path, frequent):
        """Stores that add and flush at once share one index, and know all ids."""
        path.touch()
        with JSONLinesStore(path) as one, JSONLinesStore(path) as other:

            def add(store, first):
                for number in range(first, 2000, 40):
                    store.add_many(ferns(number, number + 20))

            in_threads(lambda: add(one, 0), lambda: add(other, 20))
            wait_for_flush(path)
            for store in one, other:
                assert_stored(store, ferns(2000))

    def test_later_flush_takes_no_mark_back(self, path, caplog):
        """A process that knows fewer lines flushes last; no index is opened again."""
        with JSONLinesStore(path) as store, JSONLinesStore(path) as other:
            store.add(Plant(0, 'Fern'))
            other.add_many(ferns(50))
            for each in other, store, other:
                wait_until(each._backend()._index.flush)
                assert mark_of(path) == path.stat().st_size
                store.ping()
                other.ping()
            assert_stored(store, [Plant(0, 'Fern'), *ferns(50)])
            other.add(Plant(1, 'Fern'))
            other.close()  # beside another process
            assert mark_of(path) == path.stat().st_size
        assert 'opened again' not in caplog.text

    @pytest.mark.parametrize('change', ['-wal', 'mark'])
    def test_flush_into_another_table_is_left_out(self, path, monkeypatch, change):
        """A table that took the place of the one that was read gets no ids."""
        monkeypatch.setattr(file, 'FLUSH_WITHIN', 100)
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
            wait_until(store._backend()._index.flush)
            store.add(Plant(2, 'Moss'))
            if change == '-wal':
                copy = shutil.copy(index_of(path, '-wal'), path.with_name('copy'))
                os.replace(copy, index_of(path, '-wal'))
            else:
                with closing(sqlite3.connect(index_of(path))) as other, other:
                    other.execute('UPDATE state SET mark = 0')
            with pytest.raises(OSError, match=r'replaced|to another file'):
                store._backend()._index.flush()
            assert_stored(store, [Plant(1, 'Fern'), Plant(2, 'Moss')])

    def test_table_is_installed_under_the_flush_lock(self, path, monkeypatch):
        """A new table waits for a process that flushes into the old one."""
        monkeypatch.setattr('store.jsonl.lock.LOCK_WITHIN', 0.05)
        path.write_bytes(lines(*ferns(5)))
        with JSONLinesStore(path) as store:
            index_of(path, '-lock').touch()
            with locked(index_of(path, '-lock')):
                assert_raise(StoreUnavailable, store.ping, match='holds the lock')
            assert_stored(store, ferns(5))

    def test_flush_after_any_look_at_the_table_hides_no_id(self, path, monkeypatch):
        """An id is found although another process flushes in the middle of an add."""
        monkeypatch.setattr(index, 'LOOK_WITHIN', 0)
        with JSONLinesStore(path) as store, JSONLinesStore(path) as other:
            for number in range(3):
                store.add(Plant(number, 'Fern'))
            other.add(Plant(3, 'Moss'))  # it has read the others
            store.add(Plant(4, 'Ivy'))
            look = table.look

            def look_and_flush(*arguments):
                found = look(*arguments)
                wait_until(store._backend()._index.flush)
                return found

            with mock.patch.object(table, 'look', look_and_flush):
                for number in 3, 4, 0:
                    with pytest.raises(IdTaken):
                        other.add(Plant(number, 'Reed'))

    def test_flush_of_an_index_that_opens_hides_no_id(self, path, monkeypatch):
        """A sync that ends then moves the mark over no line that was not read."""
        monkeypatch.setattr(file, 'FLUSH_WITHIN', 100)
        read_on = recovery.read_on

        def sync_and_flush(*arguments, **options):
            backend._sync(path.stat().st_size)  # of a batch that was written before
            assert backend._index.flush()
            return read_on(*arguments, **options)

        with JSONLinesStore(path) as store:
            backend = store._backend()
            store.add_many(ferns(20))
            backend._index.close()  # as after an error of SQLite
            with mock.patch.object(recovery, 'read_on', sync_and_flush):
                store.ping()
            assert_stored(path, ferns(20))

    def test_flush_makes_no_wrong_table_credible(self, path, monkeypatch):
        fill(path, *UNEDITED)
        closed = index_of(path).read_bytes()
        store = JSONLinesStore(path)

        def flush_and_die(*arguments):
            monkeypatch.undo()
            store._backend()._index.flush()
            os._exit(0)

        def use():
            store.ping()
            edit(path)
            removed(path)
            index_of(path).write_bytes(closed)
            monkeypatch.setattr(table, 'insert', flush_and_die)
            store.ping()
            pytest.fail('no table is built')

        in_child(use)
        assert_stored(path, [EDITED], free=[100])

    def test_clients_that_count_need_no_look(self, path, monkeypatch):
        """Ids before the next in the table need no look; those taken are found."""
        monkeypatch.setattr(file, 'FLUSH_WITHIN', 100)
        with JSONLinesStore(path) as store, JSONLinesStore(path) as other:
            stores = store, other
            for id in 0, 1000:
                store.add(Plant(id, 'Fern'))
            wait_until(store._backend()._index.flush)
            monkeypatch.setattr(index, 'LOOK_WITHIN', 100)
            look, looked = table.look, []
            monkeypatch.setattr(
                table, 'look', lambda *args: looked.extend(args[1]) or look(*args)
            )
            for id in range(1, 100):
                batch = [Plant(id, 'Fern'), Plant(1000 + id, 'Fern')]
                assert stores[id % 2].add_many(batch) == [True, True]
            assert len(looked) < 20
            for id in *range(100), *range(1000, 1100):
                with pytest.raises(IdTaken):
                    other.add(Plant(id, 'Moss'))

    @pytest.mark.parametrize('seed', range(3))
    def test_no_flush_makes_an_id_free(self, path, monkeypatch, seed):
        monkeypatch.setattr(file, 'FLUSH_WITHIN', 100)
        monkeypatch.setattr(index, 'LOOK_WITHIN', 100)
        chance, stored = random.Random(seed), {}
        with JSONLinesStore(path) as one, JSONLinesStore(path) as other:
            for _ in range(300):
                store = chance.choice([one, other])
                ids = chance.sample(range(200), chance.randint(1, 3))
                plants = [Plant(id, chance.choice('ab')) for id in ids]
                new = [id not in stored for id in ids]
                for plant, result in zip(plants, store.add_many(plants), strict=True):
                    is_same = stored.setdefault(plant.id, plant) == plant
                    assert isinstance(result, bool) == is_same
                    assert result is new.pop(0) or not is_same
                if chance.random() < 0.1:
                    wait_until(store._backend()._index.flush)
        assert sorted(JSONLinesStore(path)) == sorted(stored.values())

    def test_journal_of_a_killed_process_spoils_no_index(self, path, monkeypatch):
        commit = table.commit

        def die(connection, state):
            if state.mtime is not None:
                connection.execute(table.UPDATE, state)
                os._exit(0)
            commit(connection, state)

        def close_and_die():
            store = JSONLinesStore(path)
            store.add_many(ferns(50))
            monkeypatch.setattr(table, 'commit', die)
            store.close()

        in_child(close_and_die)
        assert index_of(path, '-journal').exists()
        assert_stored(path, ferns(50))

    def test_add_many_is_bounded(self, path, monkeypatch):
        """A process that adds many plants waits for the flush of their ids."""
        monkeypatch.setattr(index, 'MOST_RECENT', 100)
        monkeypatch.setattr(file, 'FLUSH_WITHIN', 100)
        with JSONLinesStore(path) as store:
            for number in range(0, 1000, 50):
                store.add_many(ferns(number, number + 50))
                assert path.stat().st_size - mark_of(path) < len(lines(*ferns(150)))
            assert_stored(store, ferns(1000))

    def test_stopped_flush_stops_no_add(self, path, frequent, monkeypatch):
        monkeypatch.setattr(index, 'MOST_RECENT', 100)
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
            wait_for_flush(path)
            with locked(index_of(path, '-lock')):
                mark = mark_of(path)
                store.add_many(ferns(200))
                assert_stored(store, ferns(200))
                assert mark_of(path) == mark
            wait_for_flush(path)

    def test_failed_flush_is_tried_again(self, path, frequent, caplog):
        """Adds work while flushes fail, and a later flush is tried."""
        caplog.set_level(logging.INFO)
        refused = mock.patch.object(table, 'insert', failing(errno.ENOSPC))
        with JSONLinesStore(path) as store:
            store.ping()
            with refused:
                store.add_many(ferns(200))
                wait_until(lambda: 'the index is not flushed' in caplog.text)
                assert_stored(store, ferns(200))
                assert caplog.text.count('the index is not flushed') == 1
            wait_for_flush(path)
            with refused:
                store.add(Plant(1, 'Fern'))
                wait_until(lambda: caplog.text.count('the index is not flushed') == 2)

    def test_commits_need_the_flush_lock(self, path, frequent, monkeypatch):
        """The mark follows each add, and is written only under the flush lock.

        Each commit is synced, on macOS to the platter. No two tables have one number.
        """
        made, synced, numbers = [], set(), set()
        commit = table.commit

        def note(connection, state):
            pragmas = 'journal_mode', 'synchronous', 'fullfsync', 'user_version'
            rows = [connection.execute(f'PRAGMA {it}').fetchone() for it in pragmas]
            *how, number = (value for (value,) in rows)
            synced.add(tuple(how))
            numbers.add(number)
            commit(connection, state)

        monkeypatch.setattr(table, 'commit', note)

        def connect(name, **options):
            if name.endswith('?mode=rw'):
                lock = index_of(path, '-lock').open()
                with lock, suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    made.append('without the lock')
            made.append(name.rpartition('.index')[2])
            return real(name, **options)

        real = sqlite3.connect
        monkeypatch.setattr(sqlite3, 'connect', connect)
        with JSONLinesStore(path) as store, JSONLinesStore(path) as other:
            for number in range(10):
                (store if number % 2 else other).add_many(ferns(number, number + 1))
                wait_for_flush(path)
        removed(path)
        fill(path)
        assert set(made) == {'-new', '?mode=ro', '?mode=rw'}
        assert synced == {('wal', 1, 1), ('delete', 2, 1), ('off', 1, 1)}
        assert max(numbers) - min(numbers) > 100
