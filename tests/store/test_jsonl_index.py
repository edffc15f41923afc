"""The index of a plant file: merges, and damage that never gives an id twice."""

import logging
import os
import random
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from store import IdTaken, Plant, StoreCorrupt, StoreUnavailable
from store.jsonl import JSONLinesStore, record
from store.jsonl import file as plant_file
from store.jsonl import index as plant_index
from store.testing import PATIENCE, in_child, in_threads, wait_until

PAGE = 4096


@pytest.fixture(autouse=True)
def frequent_merges(monkeypatch):
    """Merge after a few ids, and without a pause between merges."""
    monkeypatch.setattr(plant_index, 'MERGE_AT', 40)
    monkeypatch.setattr(plant_file, 'MERGE_EVERY', 0)


def ferns(*span):
    """Return plants with scattered ids, the same for the same numbers."""
    return [Plant(hash((number, 7)) >> 1, f'Fern {number}') for number in range(*span)]


def index_files(path):
    """Return the paths of the index files, sorted; the manifest is the first."""
    return sorted(path.parent.glob(f'{path.name}.index*'))


def generations(path):
    """Return the SQLite files of the index."""
    return [file for file in index_files(path) if '.index-' in file.name]


def wait_for_merge(store):
    """Wait until the running merge, if any, has ended."""
    merging = store._backend()._merging
    if merging is not None:
        merging.join()


def fill(store, plants, at_once=20):
    """Add plants in batches; wait for the merge after each."""
    for start in range(0, len(plants), at_once):
        assert all(store.add_many(plants[start : start + at_once]))
        wait_for_merge(store)


def assert_knows(store, plants):
    """Check that a store has these plants, and refuses others with their ids."""
    outcomes = store.add_many([plant._replace(tag='another') for plant in plants])
    assert all(isinstance(outcome, IdTaken) for outcome in outcomes)
    assert store.add_many(plants) == [False] * len(plants)


class TestMerge:
    def test_recent_ids_are_merged_into_generations(self, path):
        """Recent ids become a generation; small generations become a larger one."""
        plants = ferns(300)
        with JSONLinesStore(path) as store:
            fill(store, plants)
            index = store._backend()._index
            assert len(index._recent) < 40
            counts = []
            for generation in index._stamps():
                file = plant_index.generation_path(index._path, generation.name)
                with closing(sqlite3.connect(file)) as connection:
                    query = 'SELECT count(*) FROM plants'
                    counts += connection.execute(query).fetchone()
            assert sum(counts) + len(index._recent) == 300
            assert_knows(store, plants)
        assert len(generations(path)) == len(counts)

    @pytest.mark.parametrize('most', [2, 4])
    def test_number_of_generations_is_limited(self, path, monkeypatch, most):
        """There are at most GENERATIONS, however many ids there are."""
        monkeypatch.setattr(plant_index, 'FACTOR', 1)
        monkeypatch.setattr(plant_index, 'GENERATIONS', most)
        plants = ferns(1000)
        seen = set()
        with JSONLinesStore(path) as store:
            for start in range(0, 1000, 40):
                fill(store, plants[start : start + 40])
                seen.add(len(generations(path)))
            assert_knows(store, plants)
        assert max(seen) == most

    def test_ids_are_seldom_copied(self, path, monkeypatch):
        """A merge copies few ids of earlier ones."""
        copied = []
        absorb = plant_index.Draft.absorb

        def counted(draft, generation):
            before = draft._connection.total_changes
            absorb(draft, generation)
            copied.append(draft._connection.total_changes - before)

        monkeypatch.setattr(plant_index.Draft, 'absorb', counted)
        with JSONLinesStore(path) as store:
            fill(store, ferns(1600), 40)
        assert 1600 < sum(copied) < 2.5 * 1600

    def test_copies_know_the_smallest_and_the_largest_id(self, path):
        """Every id is known after its generation was copied, also at both ends."""
        ends = [Plant(-(2**63), 'Fern'), Plant(2**63 - 1, 'Moss')]
        with JSONLinesStore(path) as store:
            fill(store, [*ends, *ferns(300)])
            assert_knows(store, ends)

    @pytest.mark.parametrize('behind', [False, True])
    def test_merge_works_during_syncs_unless_it_is_behind(
        self, path, monkeypatch, behind
    ):
        """A merge waits for syncs, so that requests go on; not if ids come quickly."""
        monkeypatch.setattr(plant_index, 'PAUSE_AFTER', 200)
        monkeypatch.setattr(plant_file, 'MERGE_PAUSE', 2 * PATIENCE)
        with JSONLinesStore(path) as store:
            store.add_many(ferns(80 if behind else 40))
            merging = store._backend()._merging
            merging.join(PATIENCE if behind else 0.1)
            assert merging.is_alive() != behind

            def ends_during_syncs():
                store.add_many(ferns(1))
                return not merging.is_alive()

            wait_until(ends_during_syncs)

    def test_open_reads_only_the_rest(self, path, rebuilt):
        """A store that opens reads only the lines that are in no generation."""
        plants = ferns(300)
        with JSONLinesStore(path) as store:
            fill(store, plants)
        rebuilt()
        with JSONLinesStore(path) as store:
            store.ping()
            assert len(store._backend()._index._recent) < 80
            assert_knows(store, plants)
        assert not rebuilt()

    def test_missing_index_is_built(self, path, rebuilt):
        """The index of a file without one is built at open, of all its ids."""
        plants = ferns(300)
        path.write_bytes(b''.join(map(record.encode, plants)))
        with JSONLinesStore(path) as store:
            assert_knows(store, plants)
            assert not store._backend()._index._recent
        assert rebuilt()

    @pytest.mark.parametrize('first', [0, 30, 250])
    def test_build_refuses_two_plants_with_one_id(self, path, first):
        """A build accepts a repeated line, and refuses another plant with its id."""
        plants = ferns(300)
        plants.append(plants[first])
        path.write_bytes(b''.join(map(record.encode, plants)))
        with JSONLinesStore(path) as store:
            assert_knows(store, plants[:300])
        with path.open('ab') as file:
            file.write(record.encode(plants[first]._replace(tag='another')))
        for file in index_files(path):
            file.unlink()
        with JSONLinesStore(path) as store, pytest.raises(StoreCorrupt) as caught:
            store.ping()
        assert caught.value.line == 302
        assert not generations(path)

    def test_stores_share_an_index(self, path):
        """Stores that share an index know each other's ids, whichever one merges."""
        plants = ferns(400)
        with JSONLinesStore(path) as one, JSONLinesStore(path) as other:
            for start in range(0, 400, 20):
                fill(one if start % 60 else other, plants[start : start + 20])
            assert_knows(one, plants)
            assert_knows(other, plants)

    @pytest.mark.parametrize('scattered', [True, False])
    def test_new_ids_are_seldom_looked_up(self, path, monkeypatch, scattered):
        """Look-ups of new ids in generations are rare, also after many merges."""
        plants = [Plant(number, 'Fern') for number in range(5000)]
        plants = ferns(5000) if scattered else plants
        looked_up = []
        check = plant_index.Generation.check
        with JSONLinesStore(path) as store:
            fill(store, plants[:4000], 250)
            monkeypatch.setattr(
                plant_index.Generation,
                'check',
                lambda generation: looked_up.append(1) or check(generation),
            )
            store._backend()._index.find([plant.id for plant in plants[4000:]])
            assert not looked_up[len(generations(path)) :]
            for plant in plants[4000:]:
                store._backend()._index.find([plant.id])
        assert len(looked_up) < 100

    def test_lines_of_another_process_are_not_sealed_again(self, path):
        """A store reads the lines of another process, and writes no seal for them."""
        calls = []

        class Counted:
            """System calls; those that write are counted."""

            def __getattr__(self, name):
                return getattr(os, name)

            def pwrite(self, *arguments):
                calls.append(arguments)
                return os.pwrite(*arguments)

        with JSONLinesStore(path, system=Counted()) as one, JSONLinesStore(path) as two:
            one.ping()
            for number in range(0, 10, 2):
                two.add(Plant(number, 'Fern'))
                del calls[:]
                assert one.add(Plant(number + 1, 'Fern'))
                assert len(calls) == 3  # the plant, the seal, the synced end

    def test_cut_of_a_torn_tail_keeps_the_index(self, path, caplog):
        """After a torn tail was cut off while in use, the index is still used."""
        fern, moss = Plant(1, 'Fern'), Plant(2, 'Moss')
        with JSONLinesStore(path) as store:
            store.add(fern)
            with path.open('ab') as file:
                file.write(b'{"id":3,')
            assert not store.add(fern)
            assert store.add(moss)
        assert 'is cut off' in caplog.text
        assert 'not used any more' not in caplog.text

    def test_many_lines_of_another_process_are_read_in_a_thread(
        self, path, monkeypatch
    ):
        """Many lines of another process are indexed in the scheduler's thread."""
        monkeypatch.setattr(plant_file, 'CATCH_UP_BYTES', 100)
        plants = ferns(300)
        calls = []
        with JSONLinesStore(path) as store:
            store.ping()
            backend = store._backend()
            call = backend._call
            backend._call = lambda function: calls.append(function) or call(function)
            for start, stop, expected in ((0, 1, 0), (1, 20, 1), (20, 300, 1)):
                with path.open('ab') as file:
                    file.write(b''.join(map(record.encode, plants[start:stop])))
                del calls[:]
                with pytest.raises(IdTaken):
                    store.add(plants[stop - 1]._replace(tag='another'))
                assert len(calls) == expected
            assert_knows(store, plants)

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    @pytest.mark.parametrize('call', ['open', 'fsync', 'pwrite'])
    def test_killed_merge_leaves_a_sound_index(self, path, call):
        """A process that is killed during a merge leaves a correct index."""
        plants = ferns(200)
        with JSONLinesStore(path) as store:
            fill(store, plants)

        class Mortal:
            """System calls that end the process at the first such call of a merge."""

            def __getattr__(self, name):
                def end(*arguments):
                    if threading.current_thread() is not threading.main_thread():
                        os._exit(0)
                    return getattr(os, name)(*arguments)

                return end if name == call else getattr(os, name)

        more = ferns(200, 250)

        def add():
            with JSONLinesStore(path, system=Mortal()) as mortal:
                fill(mortal, more)

        in_child(add)
        with JSONLinesStore(path) as store:
            store.add_many(more)
            wait_for_merge(store)
            assert_knows(store, [*plants, *more])
            fill(store, ferns(250, 350))
            stamps = store._backend()._index._stamps()
        assert len(generations(path)) == len(stamps)

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    def test_fork_waits_for_a_thread_in_sqlite(self, path):
        """A child inherits no lock of SQLite that a thread of the parent holds."""
        path.touch()
        writing, forked = threading.Event(), threading.Event()

        def write(first, again):
            writing.set()
            # A fork that did not wait would end long before this timeout.
            assert not forked.wait(0.2)

        def merge():
            with plant_index.Draft(path, path.stat(), 1) as draft:
                draft.extend([(1, 0), (1, 9)], write)

        def fork():
            assert writing.wait(PATIENCE)
            in_child(merge_in_child)
            forked.set()

        def merge_in_child():
            with plant_index.Draft(path, path.stat(), 1) as draft:
                draft.extend([(1, 0)], write)

        in_threads(merge, fork)

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    def test_fork_does_not_wait_for_a_pause_of_a_merge(self, path, monkeypatch):
        """A child is forked while a merge pauses in a statement, and can use SQLite."""
        monkeypatch.setattr(plant_index, 'PAUSE_AFTER', 50)
        path.touch()
        paused, forked = threading.Event(), threading.Event()

        def pause():
            paused.set()
            assert forked.wait(PATIENCE)
            return False

        def merge(pause=pause):
            with plant_index.Draft(path, path.stat(), 1, pause=pause) as draft:
                draft.extend(((number, number) for number in range(100)), pytest.fail)

        def fork():
            assert paused.wait(PATIENCE)
            in_child(lambda: merge(None))
            forked.set()

        in_threads(merge, fork)

    def test_merge_does_not_undo_another(self, path):
        """A merge that began before another one ended is refused at its end."""
        with JSONLinesStore(path) as store:
            fill(store, ferns(20))
            index = store._backend()._index
            merge = index.begin_merge()
            fill(store, ferns(20, 60))
            (stamp,) = index._stamps()
            with pytest.raises(plant_index.IndexDamaged, match='meanwhile'):
                index.end_merge(merge, stamp)

    def test_merge_stops_at_close(self, path):
        """A long merge ends soon after a close, and leaves no file."""
        path.touch()
        status = path.stat()
        with plant_index.Draft(path, status, 1) as draft, path.open('rb') as plants:
            draft.extend(((number, 0) for number in range(100_000)), pytest.fail)
            stamp = draft.finish(plants.fileno(), 0)
        old = plant_index.Generation(path, stamp)
        with (
            closing(old),
            pytest.raises(OSError, match='interrupted'),
            plant_index.Draft(path, status, 1, pause=lambda: True) as draft,
        ):
            draft.absorb(old)
        assert len(list(path.parent.iterdir())) == 2

    def test_failed_merge_is_tried_again(self, path, caplog):
        """Adds work while merges fail, and a later merge is tried."""
        caplog.set_level(logging.INFO)

        class Full:
            """System calls of a disk that has no room for another generation."""

            full = True

            def __getattr__(self, name):
                return getattr(os, name)

            def open(self, name, *arguments):
                if self.full and '.index-' in str(name):
                    raise OSError(28, os.strerror(28))
                return os.open(name, *arguments)

        plants = ferns(200)
        system = Full()
        system.full = False
        with JSONLinesStore(path, system=system) as store:
            store.ping()
            system.full = True
            fill(store, plants)
            assert not generations(path)
            assert 'the index is not merged now' in caplog.text
            system.full = False
            fill(store, ferns(200, 220))
            assert generations(path)
            assert_knows(store, plants)

    def test_index_files_have_mode_and_owner(self, path):
        """The index files have the mode and the owner of the plant file."""
        path.touch()
        path.chmod(0o640)
        if not os.geteuid():
            os.chown(path, 12, 34)
        with JSONLinesStore(path) as store:
            fill(store, ferns(200))
        of_plants = path.stat()
        for file in index_files(path):
            status = file.stat()
            assert status.st_mode == of_plants.st_mode
            assert (status.st_uid, status.st_gid) == (
                of_plants.st_uid,
                of_plants.st_gid,
            )


RUNNING = pytest.mark.parametrize('running', [True, False], ids=['running', 'at-open'])


class Spoiled:
    """A store with several generations whose files tests damage.

    Attributes:
        plants: The plants of the store.
        old: Earlier bytes of each index file, by inode.
    """

    def __init__(self, path, running, count=500):
        self.path = path
        self.plants = ferns(count)
        self.store = JSONLinesStore(path)
        last = count // 10
        fill(self.store, self.plants[:-last], 3 * last)
        self.old = {file.stat().st_ino: file.read_bytes() for file in index_files(path)}
        fill(self.store, self.plants[-last:], last // 2)
        self.store.close()
        if running:
            # Opened again, so that few pages are in its cache.
            self.store = JSONLinesStore(path)
            self.store.ping()

    def check(self):
        """Check that no id is given twice; open the store if it is closed."""
        if self.store._closed:
            self.store = JSONLinesStore(self.path)
        with self.store as store:
            assert_knows(store, self.plants)
            fill(store, ferns(9000, 9100))
            assert_knows(store, [*self.plants, *ferns(9000, 9100)])


class TestSpoiled:
    @RUNNING
    @pytest.mark.parametrize('seed', range(6))
    def test_old_pages_are_not_believed(self, path, running, seed):
        """Index files with random pages from an earlier state give no id twice."""
        choose = random.Random(seed)
        case = Spoiled(path, running, count=1200)  # in some six pages
        for file in index_files(path):
            old = case.old.get(file.stat().st_ino)
            if old is None or (file.suffix == '.index' and seed % 2):
                continue
            share = choose.choice([0.1, 0.5, 0.9, 1])
            size = 512 if file.suffix == '.index' else PAGE
            with file.open('r+b') as spoiled:
                for offset in range(0, len(old), size):
                    if choose.random() < share:
                        spoiled.seek(offset)
                        spoiled.write(old[offset : offset + size])
        case.check()

    @RUNNING
    @pytest.mark.parametrize('which', [0, 1, slice(None)], ids=str)
    @pytest.mark.parametrize(
        'spoil',
        [
            lambda file: file.write_bytes(b''),
            lambda file: os.truncate(file, file.stat().st_size // 2),
            lambda file: file.write_bytes(b'plants' * 20_000),
            lambda file: file.write_bytes(bytes(file.stat().st_size)),
            Path.unlink,
            lambda file: shutil.copy(__file__, file),
            lambda file: file.unlink() or file.touch(),
        ],
        ids=['emptied', 'cut', 'overwritten', 'zeroed', 'removed', 'copied', 'other'],
    )
    def test_spoiled_file_gives_no_id_twice(self, path, running, which, spoil):
        """A damaged index file kills no process, and no id is given twice."""
        case = Spoiled(path, running)
        files = index_files(path)[which]
        for file in files if isinstance(files, list) else [files]:
            spoil(file)
        case.check()

    @RUNNING
    def test_restored_index_is_not_believed(self, path, running, tmp_path):
        """Index files restored from an old copy give no id twice."""
        case = Spoiled(path, running)
        copies = tmp_path / 'copies'
        copies.mkdir()
        for file in index_files(path):
            shutil.copy2(file, copies)
        if not running:
            case.store = JSONLinesStore(path)
        fill(case.store, ferns(500, 700), 100)
        case.plants = ferns(700)
        for file in copies.iterdir():
            shutil.copy2(file, path.parent)
        case.check()

    def test_restored_manifest_is_not_believed(self, path, monkeypatch):
        """An old manifest is not believed while in use, even if its files exist."""
        monkeypatch.setattr(plant_index, 'FACTOR', 1)
        with JSONLinesStore(path) as store:
            fill(store, ferns(200), 200)
            manifest = index_files(path)[0]
            old = manifest.read_bytes()
            files = set(generations(path))
            fill(store, ferns(200, 300), 50)
            assert files < set(generations(path))
            with manifest.open('r+b') as file:
                file.write(old)
            assert_knows(store, ferns(300))

    @RUNNING
    @pytest.mark.parametrize('seed', range(4))
    def test_changed_bytes_of_the_manifest(self, path, running, seed):
        """Changed bytes in the manifest give no id twice."""
        choose = random.Random(seed)
        case = Spoiled(path, running)
        manifest = index_files(path)[0]
        content = bytearray(manifest.read_bytes())
        for sector in range(3):
            place = 512 * sector + choose.randrange(12)
            content[place] ^= choose.randrange(1, 256)
        manifest.write_bytes(content)
        case.check()

    @RUNNING
    def test_wrong_offsets_are_noticed(self, path, running):
        """An offset is only a hint: the line there is read, and its id compared."""
        case = Spoiled(path, running)
        if not running:
            case.store = JSONLinesStore(path)
            case.store.ping()
        recent = case.store._backend()._index._recent
        recent[case.plants[0].id] = 1
        recent[case.plants[1].id] = 0
        case.check()

    def test_removed_index_is_made_again(self, path):
        """The next add makes a removed index again; all open stores use it."""
        with JSONLinesStore(path) as one, JSONLinesStore(path) as other:
            fill(one, ferns(100))
            other.ping()
            index_files(path)[0].unlink()
            fill(one, ferns(100, 120))
            assert index_files(path)[0].suffix == '.index'
            fill(other, ferns(120, 140))
            files = index_files(path)
            assert len(files) > 1
            fill(one, ferns(140, 150))
            assert index_files(path) == files
            assert_knows(one, ferns(150))
            assert_knows(other, ferns(150))

    def test_edited_plant_file_is_indexed_again(self, path):
        """A plant file that was edited in place while in use is indexed again."""
        plants = [Plant(number, 'Fern', 'x' * 40) for number in range(100, 200)]
        with JSONLinesStore(path) as store:
            fill(store, plants)
            text = path.read_bytes()
            with path.open('r+b') as file:
                file.write(text.replace(b'"id":100,', b'"id":999,', 1))
            os.utime(path, ns=(1, -1))  # the clock may be too coarse to differ
            assert_knows(store, [Plant(999, 'Fern', 'x' * 40), *plants[1:]])
            assert store.add(plants[0])

    def test_rebuild_that_does_not_help_is_unavailable(self, path):
        """An index that is damaged even after a rebuild makes the store unavailable."""
        with JSONLinesStore(path) as store:
            fill(store, ferns(100))
            store._backend()._find = lambda ids: next(damaged())
            with pytest.raises(StoreUnavailable, match='the index: it is damaged'):
                store.add(Plant(1, 'Moss'))


def damaged():
    """Raise the error of a damaged index at the first ``next``."""
    raise plant_index.IndexDamaged('it is damaged')
    yield


def test_only_one_process_merges(path):
    """While one process merges, no other does."""
    with JSONLinesStore(path) as one, JSONLinesStore(path) as other:
        fill(one, ferns(200))
        other.ping()
        manifest = os.open(index_files(path)[0], os.O_RDONLY)
        assert plant_index.try_flock(manifest)
        fill_later = threading.Thread(target=fill, args=[one, ferns(200, 300)])
        fill_later.start()
        fill_later.join()
        wait_until(lambda: len(one._backend()._index._recent) >= 100)
        os.close(manifest)
        fill(one, ferns(300, 320))
        assert len(one._backend()._index._recent) < 40
        assert_knows(other, ferns(320))
