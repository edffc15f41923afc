"""Recovery: a plant file after a crash or an edit is cut, refused or accepted."""

import contextlib
import errno
import logging
import os
import random
import shutil
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import IdTaken, Plant, StoreCorrupt, StoreUnavailable
from store.jsonl import JSONLinesStore, record, recovery
from store.testing import in_child, in_threads

PLANTS = [
    Plant(1, 'Fern'),
    Plant(2, 'Moss', 'shade'),
    Plant(3, 'Gräser 🌱'),
    Plant(4, '"\\\n', ''),
    Plant(-5, 'Heide \u2028', 'Licht ☀'),
]
OAK = Plant(9, 'Oak')


class Quick:
    """System calls without real syncs: no test here simulates a power cut.

    Args:
        replaced: Functions that replace system calls, by name.
    """

    def __init__(self, **replaced):
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(os, name)

    def fdatasync(self, fd):
        """Do nothing."""

    fsync = fdatasync


QUICK = Quick()


def index_of(path):
    """Return the path of the index of a plant file."""
    return path.with_name(path.name + '.index')


def lines(*plants):
    """Return the records of plants."""
    return b''.join(map(record.encode, plants))


def append(path, data):
    """Append to a file, as another process that is killed after the write."""
    with path.open('ab') as file:
        file.write(data)


def take_side_files(path):
    """Return the kept torn tails, and remove their side files."""
    sides = sorted(path.parent.glob('*.torn-*'))
    contents = [side.read_bytes() for side in sides]
    for side in sides:
        side.unlink()
    return contents


def assert_stored(store, plants, free=()):
    """Check that a store has these plants, and that other ids are free."""
    store.ping()  # which may cut a torn tail off
    before = store.path.read_bytes()
    for plant in plants:
        store.add(plant)
        with pytest.raises(IdTaken):
            store.add(plant._replace(name='Another'))
    assert store.path.read_bytes() == before
    added = [Plant(id, 'Free') for id in free]
    for plant in added:
        store.add(plant)
    assert store.path.read_bytes() == before + lines(*added)


class Case:
    """A plant file of sound lines, and a store that has it open or not.

    Args:
        path: The path of the file.
        running: Whether the store opens the file before it changes.
        sound: The number of sound lines.
    """

    def __init__(self, path, running, sound=2):
        self.path = path
        self.sound = lines(*PLANTS[:sound])
        for file in path.parent.glob('plants*'):
            file.unlink()
        path.write_bytes(self.sound)
        self.store = JSONLinesStore(path, system=QUICK)
        if running:
            self.store.ping()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.store.close()


RUNNING = pytest.mark.parametrize('running', [True, False], ids=['running', 'at-open'])

# Any combination of these contains no line that is a record.
PIECES = [
    *(b'\n', b'\r\n', b'\0', bytes(600), b'\xff', '🌱'.encode()[:3], b'{', b'}', b'"'),
    *(b'[]\n', b'{}\n', b'null\n', b'{"id":3}\n', b'{"name":"Ivy"}\n', b'{"id":'),
    *(b'{"id":"3","name":"Ivy"}\n', b'{"id":3,"name":"Ivy","tag":null}\n'),
    *(b'{"id":3.0,"name":"Ivy"}\n', b'{"id":true,"name":"Ivy"}\n'),
]
GARBAGE = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(b''.join)


class TestCut:
    @RUNNING
    def test_truncation_at_every_byte(self, path, caplog, running):
        """Wherever the file ends, whole lines survive and the torn tail is kept."""
        text = lines(*PLANTS)
        for end in range(len(lines(*PLANTS[:2])), len(text) + 1):
            whole = text[:end].count(b'\n')
            torn = text[:end].removeprefix(lines(*PLANTS[:whole]))
            caplog.clear()
            with Case(path, running) as case:
                append(path, text[len(case.sound) : end])
                case.store.add(OAK)
                assert path.read_bytes() == lines(*PLANTS[:whole], OAK)
            with JSONLinesStore(path, system=QUICK) as store:
                assert_stored(store, [*PLANTS[:whole], OAK])
                assert list(store) == [*PLANTS[:whole], OAK]
            assert take_side_files(path) == [torn] * bool(torn)
            warned = [entry.getMessage() for entry in caplog.records]
            assert len(warned) == bool(torn)
            assert all(f'of {len(torn)} bytes at byte' in text for text in warned)

    def test_truncation_while_closed(self, path):
        """A file cut between lines is accepted; cut within a line it is damaged.

        The line was acknowledged, so it is no torn tail, even if only its line feed is
        missing, which an editor may have dropped.
        """
        text = lines(*PLANTS)
        for end in range(len(lines(*PLANTS[:2])), len(text)):
            path.unlink(missing_ok=True)
            path.write_bytes(text)
            with JSONLinesStore(path, create='always', system=QUICK) as store:
                store.ping()
            os.truncate(path, end)
            whole = text[:end].count(b'\n')
            with JSONLinesStore(path, system=QUICK) as store:
                if text[:end].endswith(b'\n'):
                    store.add(PLANTS[-1])
                    assert list(store) == [*PLANTS[:whole], PLANTS[-1]]
                    continue
                with pytest.raises(StoreCorrupt, match='it was acknowledged') as caught:
                    store.add(OAK)
                assert caught.value.line == whole + 1
                with pytest.raises(StoreCorrupt):
                    list(store)
            assert path.read_bytes() == text[:end]
        assert not take_side_files(path)

    @pytest.mark.parametrize('place', range(len(lines(PLANTS[4])) - 1))
    def test_damaged_last_line_is_no_torn_tail(self, path, place):
        """A damaged last line is no torn tail if it was synced."""
        path.write_bytes(lines(*PLANTS[:3]))
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[4])
        text = bytearray(path.read_bytes())
        text[len(lines(*PLANTS[:3])) + place] = 0
        path.write_bytes(text)
        with JSONLinesStore(path, system=QUICK) as store:
            for _ in range(2):
                with pytest.raises(StoreCorrupt, match='it was acknowledged'):
                    store.add(OAK)
        assert path.read_bytes() == text

    @RUNNING
    @given(garbage=GARBAGE, more=st.integers(0, 2))
    @settings(max_examples=60, deadline=None)
    def test_garbage_at_the_end_is_cut_off(
        self, tmp_path_factory, running, garbage, more
    ):
        """Any bytes after the last record are cut off, and kept in a side file."""
        path = tmp_path_factory.getbasetemp() / 'garbage' / 'plants.jsonl'
        path.parent.mkdir(exist_ok=True)
        survivors = PLANTS[: 2 + more]
        with Case(path, running) as case:
            append(path, lines(*PLANTS[2 : 2 + more]) + garbage)
            case.store.add(OAK)
            assert path.read_bytes() == lines(*survivors, OAK)
            assert_stored(case.store, [*survivors, OAK], free=[100])
        assert take_side_files(path) == [garbage]

    @RUNNING
    @given(garbage=GARBAGE, more=st.integers(0, 2))
    @settings(max_examples=60, deadline=None)
    def test_garbage_before_a_record_is_refused(
        self, tmp_path_factory, running, garbage, more
    ):
        """Garbage before a record is damage: refused with its place, not touched."""
        path = tmp_path_factory.getbasetemp() / 'damage' / 'plants.jsonl'
        path.parent.mkdir(exist_ok=True)
        before = lines(*PLANTS[: 2 + more])
        with Case(path, running) as case:
            path.write_bytes(before + garbage + b'\n' + lines(PLANTS[4]) + b'torn')
            text = path.read_bytes()
            for _ in range(2):
                with pytest.raises(StoreCorrupt) as caught:
                    case.store.add(OAK)
                assert caught.value.line == before.count(b'\n') + 1
                assert caught.value.offset == len(before)
        assert path.read_bytes() == text
        assert not take_side_files(path)

    @RUNNING
    def test_damaged_file_is_not_written(self, path, running):
        """A damaged file is not written, not even with the same bytes."""
        written = []

        def write(fd, data, offset):
            written.append(data)
            return os.pwrite(fd, data, offset)

        path.write_bytes(lines(PLANTS[0]))
        with JSONLinesStore(path, system=Quick(pwrite=write)) as store:
            if running:
                store.ping()
            append(path, b'?\n' + lines(PLANTS[1]))
            del written[:]
            with pytest.raises(StoreCorrupt):
                store.add(OAK)
        assert not written

    @pytest.mark.parametrize('reopen', [True, False], ids=['reopened', 'same-store'])
    def test_ids_cut_off_with_damage_are_free(self, path, reopen):
        """After a person has cut damage off, the ids of the cut lines are free."""
        with Case(path, running=True) as case:
            size = path.stat().st_size
            append(path, lines(*PLANTS[2:4]) + b'?\n' + lines(PLANTS[4]))
            with pytest.raises(StoreCorrupt):
                case.store.add(OAK)
            os.truncate(path, size)
            if reopen:
                case.store.close()
                case.store = JSONLinesStore(path, system=QUICK)
            # Longer plants first, so that no line begins where one began before.
            others = [Plant(id, 'x' * 90) for id in range(20, 24)]
            for plant in (*others, *reversed(PLANTS)):
                case.store.add(plant)
            assert_stored(case.store, [*others, *PLANTS], free=[OAK.id])
        with JSONLinesStore(path, system=QUICK) as store:
            assert_stored(store, [*PLANTS, *others], free=[100])

    def test_torn_tail_between_adds_is_cut_off(self, path):
        """Each store cuts off the torn tail that a killed one left, and no more."""
        with contextlib.ExitStack() as stack:
            stores = [
                stack.enter_context(JSONLinesStore(path, system=QUICK)) for _ in '123'
            ]
            for number in range(12):
                store = stores[number % 3]
                store.add(Plant(number, 'Fern'))
                append(path, b'{"id":%d,"na' % number)
            assert_stored(stores[0], [Plant(number, 'Fern') for number in range(12)])
        assert len(take_side_files(path)) == 12
        assert path.read_bytes().count(b'\n') == 12


def removed(path):
    """Remove the file; restore it from a hard link."""
    kept = path.with_name('kept')
    os.link(path, kept)
    path.unlink()
    return lambda: kept.rename(path)


def renamed(path):
    """Rename the file away."""
    away = path.rename(path.with_name('away'))
    return lambda: away.rename(path)


def replaced_by_copy(path):
    """Replace the file by a copy."""
    away = path.rename(path.with_name('away'))
    shutil.copy2(away, path)
    return lambda: away.replace(path)


def replaced_by_empty(path):
    """Replace the file by an empty one."""
    away = path.rename(path.with_name('away'))
    path.touch()
    return lambda: away.replace(path)


def replaced_by_directory(path):
    """Replace the file by a directory."""
    away = path.rename(path.with_name('away'))
    path.mkdir()

    def undo():
        path.rmdir()
        away.rename(path)

    return undo


def replaced_by_link(path):
    """Replace the file by a dangling link."""
    away = path.rename(path.with_name('away'))
    path.symlink_to('nothing')
    return lambda: away.replace(path)


def cut_short(path):
    """Cut the last line off."""
    text = path.read_bytes()
    os.truncate(path, text.rindex(b'\n', 0, -1) + 1)
    return lambda: path.write_bytes(text)


def emptied(path):
    """Cut everything off."""
    text = path.read_bytes()
    os.truncate(path, 0)
    return lambda: path.write_bytes(text)


def without_directory(path):
    """Rename the directory away."""
    away = path.parent.rename(path.parent.with_name('away'))
    return lambda: away.rename(path.parent)


SWAPS = [
    *(removed, renamed, replaced_by_copy, replaced_by_empty, replaced_by_directory),
    *(replaced_by_link, cut_short, emptied, without_directory),
]


class TestSwap:
    @pytest.fixture
    def path(self, tmp_path):
        """The path of the plant file, in its own directory."""
        (tmp_path / 'own').mkdir()
        return tmp_path / 'own' / 'plants.jsonl'

    @pytest.mark.parametrize('swap', SWAPS, ids=lambda swap: swap.__name__)
    def test_changed_file_is_refused_until_restored(self, path, swap):
        """A store whose file was changed refuses, until the change is undone."""
        with JSONLinesStore(path, system=QUICK) as store:
            for plant in PLANTS[:3]:
                store.add(plant)
            undo = swap(path)
            before = sorted(path.parent.parent.rglob('*'))
            text = path.read_bytes() if path.is_file() else None
            for plant in (PLANTS[0], PLANTS[3], PLANTS[0]._replace(name='Reed')):
                with pytest.raises(StoreUnavailable):
                    store.add(plant)
                with pytest.raises(StoreUnavailable):
                    store.ping()
            assert sorted(path.parent.parent.rglob('*')) == before
            assert (path.read_bytes() if path.is_file() else None) == text
            undo()
            store.ping()
            store.add(PLANTS[3])
            assert_stored(store, PLANTS[:4], free=[100])
        assert path.read_bytes() == lines(*PLANTS[:4], Plant(100, 'Free'))

    @pytest.mark.parametrize('longer', [1, 40], ids=['little', 'much'])
    def test_overwritten_file_gives_no_id_twice(self, path, longer):
        """A file that was overwritten in place never makes a store give an id twice."""
        before = [Plant(id, 'Fern') for id in range(10)]
        after = [Plant(id, 'Moss') for id in range(50, 60 + longer)]
        with JSONLinesStore(path, system=QUICK) as store:
            for plant in before:
                store.add(plant)
            path.write_bytes(lines(*after))
            for plant in after:
                with contextlib.suppress(StoreUnavailable):
                    store.add(plant)
                with pytest.raises((IdTaken, StoreUnavailable)):
                    store.add(plant._replace(name='Reed'))
        assert path.read_bytes() == lines(*after)
        with JSONLinesStore(path, system=QUICK) as store:
            assert_stored(store, after, free=range(10))

    @pytest.mark.parametrize('index', ['kept', 'removed'])
    @pytest.mark.parametrize('length', [4, 5, 90])
    def test_store_from_before_a_cut_harms_nothing(self, path, length, index):
        """A store that opened a file before it was cut gives no id twice.

        The file grows past the size that this store knows, where a line begins or not.
        This happens to two servers when only one is reloaded.
        """
        plants = [Plant(id, 'Fern') for id in range(10, 20)]
        with JSONLinesStore(path, system=QUICK) as old:
            for plant in plants:
                old.add(plant)
            size = path.stat().st_size
            del plants[5:]
            os.truncate(path, size // 2)
            if index == 'removed':
                path.with_name(f'{path.name}.index').unlink()
            with JSONLinesStore(path, system=QUICK) as new:
                while path.stat().st_size <= size:
                    plants.append(Plant(20 + len(plants), 'Fern'.ljust(length, '.')))
                    new.add(plants[-1])
                    with pytest.raises((IdTaken, StoreUnavailable)):
                        old.add(plants[5]._replace(name='Reed'))
                assert path.read_bytes() == lines(*plants)
                assert_stored(new, plants)
        with JSONLinesStore(path, system=QUICK) as store:
            assert_stored(store, plants, free=[15, 100])

    @pytest.mark.parametrize('create', ['first', 'never', 'always'])
    def test_open_where_only_the_index_is_left(self, path, create):
        """Where only the index is left, only ``create='always'`` makes a file."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
        undo = removed(path)
        with JSONLinesStore(path, create=create, system=QUICK) as store:
            if create == 'always':
                assert_stored(store, [], free=[1, 2])
                return
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    store.add(PLANTS[0])
                assert not path.exists()
            undo()
            assert_stored(store, PLANTS[:1], free=[100])

    def test_ping_works_during_adds(self, path):
        """Pings succeed while other threads add plants."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.ping()
            done = threading.Event()

            def add(first):
                try:
                    for id in range(first, first + 80):
                        store.add(Plant(id, 'Fern'))
                finally:
                    done.set()

            def ping():
                while not done.is_set():
                    store.ping()

            in_threads(*(lambda n=n: add(1000 * n) for n in range(3)), ping, ping)


class TestIndex:
    def test_file_edited_after_close_is_indexed_again(self, path, rebuilt):
        """A file that was edited after a clean close is indexed again."""
        plants = [Plant(id, 'Fern', 'x' * 40) for id in range(10, 30)]
        with JSONLinesStore(path, system=QUICK) as store:
            for plant in plants:
                store.add(plant)
        rebuilt()
        # An edit of the same length, far from the end.
        text = path.read_bytes()
        with path.open('r+b') as file:
            file.write(text.replace(b'"id":10,', b'"id":99,', 1))
        os.utime(path, ns=(1, 1))  # the clock may be too coarse to differ
        with JSONLinesStore(path, system=QUICK) as store:
            assert_stored(store, [Plant(99, 'Fern', 'x' * 40), *plants[1:]], free=[10])
        assert rebuilt()

    @pytest.mark.parametrize('running', [True, False], ids=['running', 'at-open'])
    @pytest.mark.parametrize('left', [1.0, 0.5, 0.0])
    def test_line_written_before_a_kill_is_found(self, path, running, left):
        """A line of a process that was killed before it updated the index is found."""

        def write_and_die(fd, data, offset):
            if data != lines(PLANTS[1]):
                return os.pwrite(fd, data, offset)
            os.pwrite(fd, data[: int(len(data) * left)], offset)
            os._exit(0)

        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])

            def add():
                mortal = JSONLinesStore(path, system=Quick(pwrite=write_and_die))
                mortal.add(PLANTS[1])

            in_child(add)
            if not running:
                store.close()
                store = JSONLinesStore(path, system=QUICK)
            with store:
                written = PLANTS[: 1 + (left == 1)]
                assert_stored(store, written, free=[100])
                assert list(store) == [*written, Plant(100, 'Free')]
        torn = lines(PLANTS[1])[: int(len(lines(PLANTS[1])) * left)]
        assert take_side_files(path) == [torn] * (left == 0.5)

    @pytest.mark.parametrize('count', [0, 3, 19, 20, 21, 60])
    def test_other_file_with_the_same_inode_is_indexed_again(self, path, count):
        """The index is not used for a new file with the inode of the old one."""
        store = JSONLinesStore(path, system=QUICK)
        for id in range(20):
            store.add(Plant(id, 'Fern'))
        store.close()
        plants = [Plant(id, 'Moss') for id in range(50, 50 + count)]
        path.write_bytes(lines(*plants))
        with JSONLinesStore(path, system=QUICK) as store:
            assert_stored(store, plants, free=range(20))

    def test_repeated_line_is_accepted(self, path):
        """A line written twice by hand is accepted; a rival with its id is not."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
            append(path, lines(PLANTS[1], PLANTS[0], PLANTS[1]))
            assert_stored(store, PLANTS[:2], free=[100])
            size = path.stat().st_size
            append(path, lines(PLANTS[2], PLANTS[2]._replace(name='Reed')))
            text = path.read_bytes()
            for _ in range(2):
                with pytest.raises(StoreCorrupt) as caught:
                    store.add(PLANTS[3])
                assert caught.value.offset == size + len(lines(PLANTS[2]))
        assert path.read_bytes() == text

    def test_exchanged_indexes_are_not_believed(self, path):
        """Indexes that were exchanged between two stores give no wrong answer."""
        other = path.with_name('other.jsonl')
        for file, plants in ((path, PLANTS[:3]), (other, PLANTS[2:])):
            with JSONLinesStore(file, system=QUICK) as store:
                for plant in plants:
                    store.add(plant)
        index_of(path).rename(path.with_name('third'))
        index_of(other).rename(index_of(path))
        path.with_name('third').rename(index_of(other))
        with (
            JSONLinesStore(path, system=QUICK) as one,
            JSONLinesStore(other, system=QUICK) as two,
        ):
            assert_stored(one, PLANTS[:3], free=[4])
            assert_stored(two, PLANTS[2:], free=[1])

    def test_restored_index_is_not_believed(self, path):
        """An index that was restored from a copy gives no wrong answer."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
        old = index_of(path).read_bytes()
        with JSONLinesStore(path, system=QUICK) as store:
            for plant in PLANTS[1:]:
                store.add(plant)
        index_of(path).write_bytes(old)
        with JSONLinesStore(path, system=QUICK) as store:
            assert_stored(store, PLANTS, free=[100])


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
class TestFork:
    def test_parent_and_child_add_at_once(self, path):
        """Parent and child may add to one store at once: each id has one winner."""
        store = JSONLinesStore(path, system=QUICK)
        winners = {name: path.with_name(name) for name in ('parent', 'child')}

        def add_all(name):
            with winners[name].open('w') as file:
                for id in random.Random(name).sample(range(300), 250):
                    with contextlib.suppress(IdTaken):
                        store.add(Plant(id, name))
                        print(id, file=file)

        with store:
            store.add(OAK._replace(id=-1))
            in_threads(
                lambda: in_child(lambda: add_all('child')), lambda: add_all('parent')
            )
            won = [
                Plant(int(line), name)
                for name, file in winners.items()
                for line in file.read_text().split()
            ]
            assert_stored(store, won, free=[1000])
            assert sorted(store)[1:-1] == sorted(won)
            assert len({plant.id for plant in won}) == len(won)

    def test_parent_child_and_grandchild_add_in_turn(self, path):
        """Parent, child and grandchild add to one store in turn, and agree."""
        with JSONLinesStore(path, system=QUICK) as store:
            for number in range(0, 12, 4):
                known = [Plant(id, 'Fern') for id in range(number)]
                store.add(Plant(number, 'Fern'))

                def use(number=number, known=known):
                    store.add(Plant(number + 1, 'Fern'))

                    def use_too():
                        assert_stored(store, [*known, Plant(number + 1, 'Fern')])
                        store.add(Plant(number + 2, 'Fern'))

                    in_child(use_too)
                    store.add(Plant(number + 2, 'Fern'))

                in_child(use)
                store.add(Plant(number + 3, 'Fern'))
        assert path.read_bytes() == lines(*(Plant(id, 'Fern') for id in range(12)))

    @pytest.mark.parametrize('leave', [JSONLinesStore.close, lambda store: None])
    def test_parent_goes_on_after_its_child_ends(self, path, leave):
        """A child that ends, with a close or without, does not affect its parent."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
            in_child(lambda: leave(store))
            store.add(PLANTS[1])

            def use_and_leave():
                store.add(PLANTS[2])
                leave(store)

            in_child(use_and_leave)
            assert_stored(store, PLANTS[:3], free=[100])

    def test_child_closes_inherited_descriptors(self, path):
        """A child that opens a store closes its copies of the parent's descriptors."""

        def opened():
            links = (f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd'))
            names = [os.readlink(link) for link in links if os.path.lexists(link)]
            return [name for name in names if name.startswith(str(path))]

        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
            before = opened()

            def look():
                store.ping()
                assert sorted(opened()) == sorted(before)

            in_child(look)
            assert_stored(store, PLANTS[:1])

    def test_killed_child_leaves_no_lock(self, path):
        """A child that is killed while it holds the lock blocks nobody."""

        def die_in_write(fd, data, offset):
            if os.getpid() != parent and data == lines(PLANTS[1]):
                os._exit(0)
            return os.pwrite(fd, data, offset)

        parent = os.getpid()
        with JSONLinesStore(path, system=Quick(pwrite=die_in_write)) as store:
            store.add(PLANTS[0])
            in_child(lambda: store.add(PLANTS[1]))
            assert_stored(store, PLANTS[:1], free=[100])


def test_long_build_logs_its_progress(tmp_path, monkeypatch, caplog):
    """A long build of an index logs how much of the file is read."""
    path = tmp_path / 'plants.jsonl'
    with JSONLinesStore(path) as store:
        store.add(Plant(1, 'Fern'))
    index_of(path).unlink()
    monkeypatch.setattr(recovery, 'PROGRESS_EVERY', -1)
    caplog.set_level(logging.INFO)
    with JSONLinesStore(path) as store:
        store.ping()
    assert f'{path}: 100 % of 0 MiB read, 0 s' in caplog.messages


def test_store_on_a_full_disk_is_not_ready(tmp_path, monkeypatch):
    """A store on a full disk is not ready."""
    with JSONLinesStore(tmp_path / 'plants.jsonl') as store:
        store.ping()
        status = os.statvfs(tmp_path)
        full = os.statvfs_result((*status[:4], 0, *status[5:]))
        monkeypatch.setattr(os, 'fstatvfs', lambda fd: full)
        with pytest.raises(StoreUnavailable, match=os.strerror(errno.ENOSPC)):
            store.ping()


@pytest.mark.parametrize('place', [0, 1, 511, 512, 513, 1500])
def test_lost_block_of_an_unsynced_batch_is_cut_off(path, place):
    """A block of zeros that a crash left in an unsynced batch is no damage.

    The acknowledged lines before it stay, and the rest goes to a side file.
    """
    known = [Plant(1, 'Fern', 'x' * place)]
    batch = [Plant(id, 'Moss', 'y' * 100) for id in range(10, 40)]
    with JSONLinesStore(path, system=QUICK) as store:
        store.add(known[0])
    append(path, lines(*batch))
    # Zeros from the synced end to the end of a block.
    text = path.read_bytes()
    start = len(lines(*known))
    end = (start // 512 + 2) * 512
    path.write_bytes(text[:start] + bytes(end - start) + text[end:])
    with JSONLinesStore(path, system=QUICK) as store:
        assert_stored(store, known, free=[10, 39])
    (kept,) = take_side_files(path)
    assert kept == bytes(end - start) + text[end:]


@pytest.mark.parametrize(
    ('synced', 'end', 'running'),
    [(True, 1024, False), (False, 1000, False), (False, 1024, True)],
    ids=['synced', 'within-a-block', 'running'],
)
def test_zeros_that_are_no_lost_block_are_damage(path, synced, end, running):
    """Zeros that no crash can have left are damage: nothing is touched."""
    batch = [Plant(id, 'Moss', 'y' * 100) for id in range(10, 40)]
    with JSONLinesStore(path, system=QUICK) as store:
        store.ping()
        if synced:
            store.add_many(batch)
        else:
            append(path, lines(*batch))
        text = path.read_bytes()
        text = bytes(end) + text[end:]
        if running:
            path.write_bytes(text)
            with pytest.raises(StoreCorrupt):
                store.add(OAK)
    path.write_bytes(text)
    if not running:
        with JSONLinesStore(path, system=QUICK) as store, pytest.raises(StoreCorrupt):
            store.add(OAK)
    assert path.read_bytes() == text


def test_interrupt_after_a_cut_keeps_the_side_file(path):
    """An interrupt right after a torn tail was cut off keeps its only copy."""

    def cut(fd, size):
        os.ftruncate(fd, size)
        raise KeyboardInterrupt

    path.write_bytes(lines(PLANTS[0]) + b'torn')
    store = JSONLinesStore(path, system=Quick(ftruncate=cut))
    with pytest.raises(KeyboardInterrupt):
        store.add(OAK)
    assert path.read_bytes() == lines(PLANTS[0])
    assert take_side_files(path) == [b'torn']


@pytest.mark.parametrize('ending', [b'', b'\n'], ids=['torn', 'damaged'])
@pytest.mark.parametrize('byte', [b'x', b'\0'], ids=['text', 'zeros'])
def test_time_of_a_long_line_is_linear(path, monkeypatch, byte, ending):
    """A long line is read in time proportional to its length."""
    monkeypatch.setattr(recovery, 'CHUNK', 1024)
    path.write_bytes(lines(PLANTS[0]) + 4_000_000 * byte + ending)
    began = time.process_time()
    with JSONLinesStore(path, system=QUICK) as store:
        store.add(OAK)
    # Appending 1 KiB pieces one by one would copy 8 GB.
    assert time.process_time() - began < 1.5
    assert path.read_bytes() == lines(PLANTS[0], OAK)


def test_file_time_before_1970_is_accepted(path):
    """The times of a file may be before 1970."""
    for seconds in (-5, -(2**31)):
        path.write_bytes(lines(*PLANTS))
        os.utime(path, (seconds, seconds))
        with JSONLinesStore(path, system=QUICK) as store:
            assert_stored(store, PLANTS)
