"""A plant file that a crash, or a person, has changed, is cut, refused or believed."""

import contextlib
import errno
import logging
import os
import random
import shutil
import threading
import time

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from store import IdTaken
from store import Plant
from store import StoreCorrupt
from store import StoreUnavailable
from store.jsonl import JSONLinesStore
from store.jsonl import record
from store.jsonl import recovery
from store.testing import in_child
from store.testing import in_threads

PLANTS = [
    Plant(1, 'Fern'),
    Plant(2, 'Moss', 'shade'),
    Plant(3, 'Gräser 🌱'),
    Plant(4, '"\\\n', ''),
    Plant(-5, 'Heide \u2028', 'Licht ☀'),
]
OAK = Plant(9, 'Oak')


class Quick:
    """The system calls, with syncs that take no time; nothing here loses power.

    Args:
        replaced: Other functions to use, by name.
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
    """Return where the index of a plant file is."""
    return path.with_name(path.name + '.index')


def lines(*plants):
    """Return the records of plants."""
    return b''.join(map(record.encode, plants))


def append(path, data):
    """Write at the end of a file, as another process that dies after it."""
    with path.open('ab') as file:
        file.write(data)


def take_side_files(path):
    """Return what torn tails were kept, and remove them."""
    sides = sorted(path.parent.glob('*.torn-*'))
    contents = [side.read_bytes() for side in sides]
    for side in sides:
        side.unlink()
    return contents


def assert_right(store, plants, free=()):
    """Check what a store says to plants that it has, and to ids that it has not."""
    store.ping()  # it may be about to cut a torn tail off
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
    """A plant file that a store has open, or is to open, and what follows sound lines.

    Args:
        path: Of the file.
        running: Whether the store is open when the file changes.
        sound: How many plants the store knows before.
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

# Whatever is put together of these, no line of it is a record.
PIECES = [
    *(b'\n', b'\r\n', b'\0', bytes(600), b'\xff', '🌱'.encode()[:3], b'{', b'}', b'"'),
    *(b'[]\n', b'{}\n', b'null\n', b'{"id":3}\n', b'{"name":"Ivy"}\n', b'{"id":'),
    *(b'{"id":"3","name":"Ivy"}\n', b'{"id":3,"name":"Ivy","tag":null}\n'),
    *(b'{"id":3.0,"name":"Ivy"}\n', b'{"id":true,"name":"Ivy"}\n'),
]
GARBAGE = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(b''.join)


class TestCut:
    @RUNNING
    def test_every_byte(self, path, caplog, running):
        """Wherever the file ends, whole lines survive and the rest is kept aside."""
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
                assert_right(store, [*PLANTS[:whole], OAK])
                assert list(store) == [*PLANTS[:whole], OAK]
            assert take_side_files(path) == [torn] * bool(torn)
            warned = [entry.getMessage() for entry in caplog.records]
            assert len(warned) == bool(torn)
            assert all(f'of {len(torn)} bytes at byte' in text for text in warned)

    def test_cut_while_closed(self, path):
        """A file that was cut between lines is believed; within a line it is damaged.

        The line was acknowledged: it is no torn tail, also if it lacks the line feed
        only, which an editor may have dropped.
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
    def test_damaged_last_line(self, path, place):
        """Damage of the last line of a file is no torn tail if the line was synced."""
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
    def test_garbage(self, tmp_path_factory, running, garbage, more):
        """What follows the last record, whatever it is, is cut off and kept aside."""
        path = tmp_path_factory.getbasetemp() / 'garbage' / 'plants.jsonl'
        path.parent.mkdir(exist_ok=True)
        survivors = PLANTS[: 2 + more]
        with Case(path, running) as case:
            append(path, lines(*PLANTS[2 : 2 + more]) + garbage)
            case.store.add(OAK)
            assert path.read_bytes() == lines(*survivors, OAK)
            assert_right(case.store, [*survivors, OAK], free=[100])
        assert take_side_files(path) == [garbage]

    @RUNNING
    @given(garbage=GARBAGE, more=st.integers(0, 2))
    @settings(max_examples=60, deadline=None)
    def test_damage(self, tmp_path_factory, running, garbage, more):
        """A record after what is none makes it damage: refused, named, not touched."""
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
    def test_damage_is_not_written(self, path, running):
        """A damaged file is not written at all, not even with the bytes that it has."""
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
    def test_damage_that_is_taken_away(self, path, reopen):
        """After damage has been cut off by hand, the ids that went with it are free."""
        with Case(path, running=True) as case:
            size = path.stat().st_size
            append(path, lines(*PLANTS[2:4]) + b'?\n' + lines(PLANTS[4]))
            with pytest.raises(StoreCorrupt):
                case.store.add(OAK)
            os.truncate(path, size)
            if reopen:
                case.store.close()
                case.store = JSONLinesStore(path, system=QUICK)
            # Some that are longer, so that no line begins where one did before.
            others = [Plant(id, 'x' * 90) for id in range(20, 24)]
            for plant in (*others, *reversed(PLANTS)):
                case.store.add(plant)
            assert_right(case.store, [*others, *PLANTS], free=[OAK.id])
        with JSONLinesStore(path, system=QUICK) as store:
            assert_right(store, [*PLANTS, *others], free=[100])

    def test_cut_between_two_adds(self, path):
        """Each store cuts off what a dead one left between two adds, no more."""
        with contextlib.ExitStack() as stack:
            stores = [
                stack.enter_context(JSONLinesStore(path, system=QUICK)) for _ in '123'
            ]
            for number in range(12):
                store = stores[number % 3]
                store.add(Plant(number, 'Fern'))
                append(path, b'{"id":%d,"na' % number)
            assert_right(stores[0], [Plant(number, 'Fern') for number in range(12)])
        assert len(take_side_files(path)) == 12
        assert path.read_bytes().count(b'\n') == 12


def removed(path):
    """Remove the file; it is put back with a hard link."""
    kept = path.with_name('kept')
    os.link(path, kept)
    path.unlink()
    return lambda: kept.rename(path)


def renamed(path):
    """Rename the file away."""
    away = path.rename(path.with_name('away'))
    return lambda: away.rename(path)


def replaced_by_copy(path):
    """Replace the file by another that holds the same."""
    away = path.rename(path.with_name('away'))
    shutil.copy2(away, path)
    return lambda: away.replace(path)


def replaced_by_empty(path):
    """Replace the file by an empty one."""
    away = path.rename(path.with_name('away'))
    path.touch()
    return lambda: away.replace(path)


def replaced_by_directory(path):
    """Put a directory in the place of the file."""
    away = path.rename(path.with_name('away'))
    path.mkdir()

    def undo():
        path.rmdir()
        away.rename(path)

    return undo


def linked_elsewhere(path):
    """Put a link to nothing in the place of the file."""
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
    *(linked_elsewhere, cut_short, emptied, without_directory),
]


class TestSwap:
    @pytest.fixture
    def path(self, tmp_path):
        """Where the plant file is, in a directory of its own."""
        (tmp_path / 'own').mkdir()
        return tmp_path / 'own' / 'plants.jsonl'

    @pytest.mark.parametrize('swap', SWAPS, ids=lambda swap: swap.__name__)
    def test_refused_until_undone(self, path, swap):
        """A store whose file is not what it was refuses, and goes on when it is."""
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
            assert_right(store, PLANTS[:4], free=[100])
        assert path.read_bytes() == lines(*PLANTS[:4], Plant(100, 'Free'))

    @pytest.mark.parametrize('longer', [1, 40], ids=['little', 'much'])
    def test_cut_and_grown_again(self, path, longer):
        """A file that became another in place never makes a store take an id twice."""
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
            assert_right(store, after, free=range(10))

    @pytest.mark.parametrize('index', ['kept', 'removed'])
    @pytest.mark.parametrize('length', [4, 5, 90])
    def test_cut_and_opened_by_another(self, path, length, index):
        """A store that knows a file from before it was cut harms nothing that follows.

        The file grows past the size that it knows, to an offset where lines begin or
        not. So it is with two servers, of which one is reloaded.
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
                assert_right(new, plants)
        with JSONLinesStore(path, system=QUICK) as store:
            assert_right(store, plants, free=[15, 100])

    @pytest.mark.parametrize('create', ['first', 'never', 'always'])
    def test_start_without_file(self, path, create):
        """A start where only the index is left makes a file if it is told to always."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
        undo = removed(path)
        with JSONLinesStore(path, create=create, system=QUICK) as store:
            if create == 'always':
                assert_right(store, [], free=[1, 2])
                return
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    store.add(PLANTS[0])
                assert not path.exists()
            undo()
            assert_right(store, PLANTS[:1], free=[100])

    def test_ping_beside_adds(self, path):
        """A ping while plants are added sees no trouble where there is none."""
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
    def test_edited_after_close(self, path, rebuilt):
        """A file that was edited after a clean close is indexed again."""
        plants = [Plant(id, 'Fern', 'x' * 40) for id in range(10, 30)]
        with JSONLinesStore(path, system=QUICK) as store:
            for plant in plants:
                store.add(plant)
        rebuilt()
        # Of the same length, and far from the end.
        text = path.read_bytes()
        with path.open('r+b') as file:
            file.write(text.replace(b'"id":10,', b'"id":99,', 1))
        os.utime(path, ns=(1, 1))  # a clock may be too coarse to show it
        with JSONLinesStore(path, system=QUICK) as store:
            assert_right(store, [Plant(99, 'Fern', 'x' * 40), *plants[1:]], free=[10])
        assert rebuilt()

    @pytest.mark.parametrize('running', [True, False], ids=['running', 'at-open'])
    @pytest.mark.parametrize('left', [1.0, 0.5, 0.0])
    def test_killed_before_the_index(self, path, running, left):
        """What a process wrote that died before it reached the index is found."""

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
                assert_right(store, written, free=[100])
                assert list(store) == [*written, Plant(100, 'Free')]
        torn = lines(PLANTS[1])[: int(len(lines(PLANTS[1])) * left)]
        assert take_side_files(path) == [torn] * (left == 0.5)

    @pytest.mark.parametrize('count', [0, 3, 19, 20, 21, 60])
    def test_other_file_with_the_same_inode(self, path, count):
        """A new file with the inode number of the old one has no use for its index."""
        store = JSONLinesStore(path, system=QUICK)
        for id in range(20):
            store.add(Plant(id, 'Fern'))
        store.close()
        plants = [Plant(id, 'Moss') for id in range(50, 50 + count)]
        path.write_bytes(lines(*plants))
        with JSONLinesStore(path, system=QUICK) as store:
            assert_right(store, plants, free=range(20))

    def test_written_twice(self, path):
        """A plant that was written by hand twice is accepted, another one is not."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
            append(path, lines(PLANTS[1], PLANTS[0], PLANTS[1]))
            assert_right(store, PLANTS[:2], free=[100])
            size = path.stat().st_size
            append(path, lines(PLANTS[2], PLANTS[2]._replace(name='Reed')))
            text = path.read_bytes()
            for _ in range(2):
                with pytest.raises(StoreCorrupt) as caught:
                    store.add(PLANTS[3])
                assert caught.value.offset == size + len(lines(PLANTS[2]))
        assert path.read_bytes() == text

    def test_exchanged_indexes(self, path):
        """Indexes that were exchanged between two stores make no answer wrong."""
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
            assert_right(one, PLANTS[:3], free=[4])
            assert_right(two, PLANTS[2:], free=[1])

    def test_old_copy(self, path):
        """An index that was put back from a copy makes no answer wrong."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
        old = index_of(path).read_bytes()
        with JSONLinesStore(path, system=QUICK) as store:
            for plant in PLANTS[1:]:
                store.add(plant)
        index_of(path).write_bytes(old)
        with JSONLinesStore(path, system=QUICK) as store:
            assert_right(store, PLANTS, free=[100])


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
class TestFork:
    def test_at_once(self, path):
        """Parent and child may use one store at once: each id has one winner."""
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
            assert_right(store, won, free=[1000])
            assert sorted(store)[1:-1] == sorted(won)
            assert len({plant.id for plant in won}) == len(won)

    def test_in_turn(self, path):
        """Parent, child and grandchild may use one store in turn, and agree."""
        with JSONLinesStore(path, system=QUICK) as store:
            for number in range(0, 12, 4):
                known = [Plant(id, 'Fern') for id in range(number)]
                store.add(Plant(number, 'Fern'))

                def use(number=number, known=known):
                    store.add(Plant(number + 1, 'Fern'))

                    def use_too():
                        assert_right(store, [*known, Plant(number + 1, 'Fern')])
                        store.add(Plant(number + 2, 'Fern'))

                    in_child(use_too)
                    store.add(Plant(number + 2, 'Fern'))

                in_child(use)
                store.add(Plant(number + 3, 'Fern'))
        assert path.read_bytes() == lines(*(Plant(id, 'Fern') for id in range(12)))

    @pytest.mark.parametrize('leave', [JSONLinesStore.close, lambda store: None])
    def test_child_leaves(self, path, leave):
        """A child that ends, with a close or without, takes nothing from its parent."""
        with JSONLinesStore(path, system=QUICK) as store:
            store.add(PLANTS[0])
            in_child(lambda: leave(store))
            store.add(PLANTS[1])

            def use_and_leave():
                store.add(PLANTS[2])
                leave(store)

            in_child(use_and_leave)
            assert_right(store, PLANTS[:3], free=[100])

    def test_descriptors(self, path):
        """A child that uses a store gives back what its parent had opened."""

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
            assert_right(store, PLANTS[:1])

    def test_crash_of_a_child(self, path):
        """A child that dies while it holds the lock stops nobody."""

        def die_in_write(fd, data, offset):
            if os.getpid() != parent and data == lines(PLANTS[1]):
                os._exit(0)
            return os.pwrite(fd, data, offset)

        parent = os.getpid()
        with JSONLinesStore(path, system=Quick(pwrite=die_in_write)) as store:
            store.add(PLANTS[0])
            in_child(lambda: store.add(PLANTS[1]))
            assert_right(store, PLANTS[:1], free=[100])


def test_progress(tmp_path, monkeypatch, caplog):
    """Building an index that takes long says in the log how far it is."""
    path = tmp_path / 'plants.jsonl'
    with JSONLinesStore(path) as store:
        store.add(Plant(1, 'Fern'))
    index_of(path).unlink()
    monkeypatch.setattr(recovery, 'PROGRESS_EVERY', -1)
    caplog.set_level(logging.INFO)
    with JSONLinesStore(path) as store:
        store.ping()
    assert f'{path}: 100 % of 0 MiB read, 0 s' in caplog.messages


def test_no_space_left(tmp_path, monkeypatch):
    """A store on a full disk is not ready."""
    with JSONLinesStore(tmp_path / 'plants.jsonl') as store:
        store.ping()
        status = os.statvfs(tmp_path)
        full = os.statvfs_result((*status[:4], 0, *status[5:]))
        monkeypatch.setattr(os, 'fstatvfs', lambda fd: full)
        with pytest.raises(StoreUnavailable, match=os.strerror(errno.ENOSPC)):
            store.ping()


@pytest.mark.parametrize('place', [0, 1, 511, 512, 513, 1500])
def test_lost_block(path, place):
    """A block that a crash lost, of a batch that was not synced, is no damage.

    What was acknowledged before it stays, and what follows it is kept aside.
    """
    known = [Plant(1, 'Fern', 'x' * place)]
    batch = [Plant(id, 'Moss', 'y' * 100) for id in range(10, 40)]
    with JSONLinesStore(path, system=QUICK) as store:
        store.add(known[0])
    append(path, lines(*batch))
    # Everything up to the end of a block, from where the synced bytes end.
    text = path.read_bytes()
    start = len(lines(*known))
    end = (start // 512 + 2) * 512
    path.write_bytes(text[:start] + bytes(end - start) + text[end:])
    with JSONLinesStore(path, system=QUICK) as store:
        assert_right(store, known, free=[10, 39])
    (kept,) = take_side_files(path)
    assert kept == bytes(end - start) + text[end:]


@pytest.mark.parametrize(
    ('synced', 'end', 'running'),
    [(True, 1024, False), (False, 1000, False), (False, 1024, True)],
    ids=['synced', 'within-a-block', 'running'],
)
def test_zeros_that_no_crash_has_left(path, synced, end, running):
    """Zeros that cannot be a lost block are damage: nothing is touched."""
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


def test_interrupted_after_a_cut(path):
    """An interrupt right after a torn tail was cut off leaves its only copy alone."""

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
def test_long_line(path, monkeypatch, byte, ending):
    """A line takes time in proportion to its length, however long it is."""
    monkeypatch.setattr(recovery, 'CHUNK', 1024)
    path.write_bytes(lines(PLANTS[0]) + 4_000_000 * byte + ending)
    began = time.process_time()
    with JSONLinesStore(path, system=QUICK) as store:
        store.add(OAK)
    # In pieces that are put together one by one, 8 GB would be copied.
    assert time.process_time() - began < 1.5
    assert path.read_bytes() == lines(PLANTS[0], OAK)


def test_time_before_1970(path):
    """The clock of a file may have gone back before 1970."""
    for seconds in (-5, -(2**31)):
        path.write_bytes(lines(*PLANTS))
        os.utime(path, (seconds, seconds))
        with JSONLinesStore(path, system=QUICK) as store:
            assert_right(store, PLANTS)
