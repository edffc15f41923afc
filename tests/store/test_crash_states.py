"""Every state that a crash may leave of a plant file opens, and has what it must."""

import errno
import itertools
import json
import logging
import os
import tempfile
import threading
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path
from random import Random
from random import SystemRandom
from unittest import mock

import pytest
from crash_states import Crash
from crash_states import Recorder

from store import IdTaken
from store import Plant
from store import StoreCorrupt
from store import StoreUnavailable
from store.jsonl import JSONLinesStore
from store.jsonl import file
from store.jsonl import index
from store.jsonl.record import encode
from store.jsonl.repair import repair

# How many states of each scenario are tried, or all.
STATES = os.environ.get('CRASH_STATES', '300')
LIMIT = None if STATES == 'all' else int(STATES)
SEED = int(os.environ.get('CRASH_SEED') or SystemRandom().randrange(2**32))
# Of each scenario, those that are followed by a second one.
FIRST_CRASHES = 10 if LIMIT else 50
MIXTURES = 3  # of the index, with each state of the plant file
BLOCKS = 512, 4096
NEW = Plant(0, 'New')
# Plants for small batches, for some blocks of 512 bytes, and for blocks of 4 KiB.
FERN, MOSS, IVY = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Ivy')
LONG = [Plant(number, 'Oak' * 110) for number in range(11, 14)]
LONGER = [Plant(number, 'Ash' * 600) for number in range(21, 24)]
OTHERS = [Plant(number, 'Yew' * 80) for number in range(31, 35)]


class Killed(BaseException):
    """The process ends here, and no handler can do anything about it."""


class Process:
    """The system calls of a process that may be killed, or whose disk may be full.

    Args:
        path: Of the plant file.

    Attributes:
        last: The name of the call that is its last one for the plant file.
        full_after: How many bytes of a write find room, or ``None``.
    """

    def __init__(self, path):
        self.last = self.full_after = None
        self._path = path
        self._killed = False

    def __getattr__(self, name):
        function = getattr(os, name)

        def call(target, *arguments, **options):
            if self._killed:
                raise Killed
            result = function(target, *arguments, **options)
            if name == self.last and os.path.sameopenfile(target, self._fd):
                self._killed = True
                raise Killed
            return result

        return call if callable(function) else function

    def open(self, path, *arguments, **options):
        fd = self.__getattr__('open')(path, *arguments, **options)
        if path == self._path:
            self._fd = fd
        return fd

    def pwrite(self, fd, data, offset):
        if self.full_after is None or offset + len(data) <= os.fstat(fd).st_size:
            return self.__getattr__('pwrite')(fd, data, offset)
        room, self.full_after = self.full_after, 0
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(fd, data[:room], offset)


def lines(*plants):
    """Return the records of plants."""
    return b''.join(map(encode, plants))


def first_add(disk, opened):
    """Two plants, one after the other, in a store that was not there."""
    with opened() as store:
        disk.add(store, FERN)
        disk.add(store, MOSS)


def batches(disk, opened):
    """Two processes whose batches overlap: one is written while the other is synced."""
    with opened() as store, opened() as other:
        disk.add(store, FERN)
        other.ping()

        def meanwhile():
            disk.before_sync = None
            disk.add(other, *OTHERS)

        disk.before_sync = meanwhile
        disk.add(store, *LONG)
        disk.add(other, *LONG, IVY)


def large_batch(disk, opened):
    """A batch of many blocks, and a small one."""
    with opened() as store:
        disk.add(store, *LONGER)
        disk.add(store, *LONG, FERN)


def killed_process(disk, opened):
    """A process dies when it has written, and another one hears the same plants."""
    for last, plants in ('pwrite', LONG), ('fdatasync', OTHERS):
        process = Process(disk.path)
        killed = opened(process)
        with opened() as store:
            disk.add(killed, FERN)
            disk.add(store, MOSS)
            process.last = last
            with suppress(Killed):
                disk.add(killed, *plants)
            disk.add(store, plants[1])
            disk.add(store, IVY, *plants)


def killed_last_process(disk, opened):
    """A process dies when it has written, and the next one opens the file."""
    process = Process(disk.path)
    killed = opened(process)
    disk.add(killed, FERN)
    process.last = 'pwrite'
    with suppress(Killed):
        disk.add(killed, *LONG, LONGER[0])
    with opened() as store:
        store.ping()
        disk.add(store, LONG[1])
        disk.add(store, IVY)


def torn_tail(disk, opened):
    """A torn tail is cut off, and another plant comes in its place."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
    disk.send(*LONGER)
    torn = lines(*LONGER)[:3000]  # a whole line, and a part of one
    disk.append(torn)
    disk.keep(torn.rpartition(b'\n')[2])
    with opened() as store:
        disk.add(store, MOSS)
        disk.add(store, *OTHERS)


def lost_block(disk, opened):
    """A torn tail that is a lost block and sound records of its batch."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
    disk.send(*LONGER, IVY)
    batch = lines(*LONGER, IVY)
    lost = 4096 - disk.path.stat().st_size
    torn = bytes(lost) + batch[lost:]
    disk.append(torn)
    disk.keep(torn)
    with opened() as store:
        disk.add(store, MOSS)
        disk.add(store, *OTHERS)


def torn_tail_while_open(disk, opened):
    """A process finds what another one has left behind, and writes over it."""
    for plants in OTHERS, [MOSS]:
        with opened() as store:
            disk.add(store, FERN, *LONG)
            disk.send(*LONGER)
            disk.append(lines(*LONGER)[:3000])
            disk.add(store, *plants)
            disk.add(store, IVY)


def full_disk(disk, opened):
    """A write that fails in the middle, and another one in its place."""
    process = Process(disk.path)
    with opened(process) as store:
        disk.add(store, FERN, *LONG)
        process.full_after = 3000
        disk.send(*LONGER)
        with pytest.raises(StoreUnavailable):
            disk.add(store, *LONGER)
        process.full_after = None
        disk.add(store, *OTHERS)
        disk.add(store, IVY)


def index_built(disk, opened):
    """A file without an index."""
    with opened() as store:
        disk.add(store, FERN, *LONG, *OTHERS)
    for path in disk.directory.glob('*.index*'):
        os.unlink(path)
    disk.settle()
    with opened() as store:
        store.ping()
        disk.add(store, MOSS)


@contextmanager
def merging():
    """Let three recent ids be merged; yield a function that waits for the merges."""
    threads = set(threading.enumerate())

    def merged():
        if threading.current_thread() in threads:
            for merge in set(threading.enumerate()) - threads:
                merge.join()

    with (
        mock.patch.multiple(index, MERGE_AT=3),
        mock.patch.multiple(file, MERGE_EVERY=0),
    ):
        yield merged


def merges(disk, opened):
    """Recent ids of two processes go to the index on disk, before a sync of the plants.

    Each merge makes a file, and removes those that it has taken up.
    """
    numbers = itertools.count(41)
    with merging() as merged, opened() as store, opened() as other:
        disk.before_sync = merged
        for process in store, other, store, store, other:
            disk.add(process, *(Plant(next(numbers), 'Fir' * 99) for _ in range(3)))
    disk.continued = merge_again


def merge_again(store):
    """Go on with what the merges have left: make one more file."""
    with merging() as merged, mock.patch.multiple(index, TICK=0):
        store.add_many([Plant(number, 'Elm') for number in range(91, 94)])
        merged()


def repaired(disk, opened):
    """A line that a person has damaged is moved out of the file."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
    disk.damage = b'{"id":7,"name":"Pe\n'
    disk.send(*OTHERS)
    disk.append(disk.damage + lines(*OTHERS))
    disk.keep(disk.damage)
    repair(disk.path)
    with opened() as store:
        disk.add(store, MOSS)


SCENARIOS = [
    first_add,
    batches,
    large_batch,
    killed_process,
    killed_last_process,
    torn_tail,
    lost_block,
    full_disk,
    torn_tail_while_open,
    index_built,
    merges,
    repaired,
]


@pytest.fixture
def directory():
    """A directory in memory if there can be one: thousands of files are written.

    Nothing is logged meanwhile: pytest would keep it all.
    """
    logging.disable()
    memory = '/dev/shm'
    with tempfile.TemporaryDirectory(
        dir=memory if os.path.isdir(memory) else None
    ) as directory:
        yield Path(directory)
    logging.disable(logging.NOTSET)


def record(directory, scenario, system=os):
    """Return what a recorder has seen of a scenario."""
    (directory / 'store').mkdir()
    recorder = Recorder(directory / 'store', Path(tempfile.mkdtemp(dir=directory)))

    def opened(system=system):
        return JSONLinesStore(recorder.path, system=system)

    with recorder.recording():
        scenario(recorder, opened)
    return recorder


def raw_plants(path):
    """Return the plants of a sound file, read without the store's code."""
    content = path.read_bytes()
    assert not content or content.endswith(b'\n')
    plants = [Plant(**json.loads(line)) for line in content.split(b'\n')[:-1]]
    by_id = {plant.id: plant for plant in plants}
    assert [by_id[plant.id] for plant in plants] == plants, 'an id is there twice'
    return set(plants)


def repair_damage(recorder):
    """Do what opening the file asks for, where a person has damaged it."""
    path, damage = recorder.path, recorder.damage
    if damage and path.exists() and damage in path.read_bytes():
        with JSONLinesStore(path) as store, pytest.raises(StoreCorrupt):
            store.ping()
        repair(path)


def check(crash):
    """Open what a crash left; find what was acknowledged, nothing that nobody sent."""
    recorder, path = crash.recorder, crash.recorder.path
    repair_damage(recorder)
    left = path.read_bytes() if path.exists() else b''
    with JSONLinesStore(path) as store:
        store.add_many([])  # it opens
        found = raw_plants(path)
        whole = path.read_bytes()
        sides = [side.read_bytes() for side in path.parent.glob('plants.jsonl.*-[0-9]')]
        assert whole == left or left.removeprefix(whole) in sides, 'bytes are gone'
        moment, kept = recorder.kept
        if crash.moment >= moment:
            assert any(kept in data for data in [whole, *sides]), 'bytes are gone'
        recorder.continued(store)
        acknowledged = by_then(recorder.acknowledged, crash)
        assert found >= acknowledged, f'lost: {acknowledged - found}'
        unknown = found - by_then(recorder.sent, crash)
        assert not unknown, f'nobody sent {unknown}'
        there = sorted(found)
        fakes = [plant._replace(name='Fake') for plant in there]
        told = store.add_many([*there, *fakes, NEW])
        assert told[: len(there)] == [False] * len(there)
        taken = [isinstance(one, IdTaken) for one in told[len(there) : -1]]
        assert taken == [True] * len(there), 'an id is given twice'
        assert told[-1] is True
    assert path.read_bytes().startswith(whole)
    assert NEW in raw_plants(path)


def by_then(moments, crash):
    """Return the plants of which something was said before a crash."""
    return {plant for plant, moment in moments.items() if moment <= crash.moment}


def fault(state):
    """Return what is wrong with a state, or ``None``."""
    try:
        with state.placed():
            check(state.crash)
    except Exception as ex:
        return f'{type(ex).__name__}: {ex}'[:500]
    return None


def states(recorder, block, chance, limit):
    """Yield states, none twice; all of them, or some that chance takes."""
    crashes = [Crash(recorder, moment, block) for moment in recorder.moments]
    if limit is None:
        found = (state for crash in crashes for state in crash.all(chance, MIXTURES))
    else:
        # More of those moments where more may have been lost.
        weights = [1 + len(crash.questions) for crash in crashes]
        taken = chance.choices(crashes, weights, k=5 * limit)
        found = (crash.some(chance) for crash in taken)
    seen = set()
    for state in found:
        told = len(by_then(recorder.acknowledged, state.crash))
        key = hash((tuple(state.files.items()), told))
        if key not in seen:
            seen.add(key)
            yield state
            if len(seen) == limit:
                break


def first_fault(recorder, block, chance, limit):
    """Return how many states were tried, and what is wrong with the first bad one."""
    count = 0
    for state in states(recorder, block, chance, limit):
        count += 1
        if fault(state):
            state = state.smallest(fault)
            return count, f'{state}\n{fault(state)}'
    return count, ''


@pytest.mark.parametrize('block', BLOCKS)
@pytest.mark.parametrize('scenario', SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_crash(directory, scenario, block):
    """Acknowledged plants are there after a crash at any moment of a scenario."""
    recorder = record(directory, scenario)
    chance = Random(f'{SEED} {scenario.__name__} {block}')
    _, text = first_fault(recorder, block, chance, LIMIT)
    assert not text, f'{text}\nwith CRASH_SEED={SEED} CRASH_STATES={STATES}'


@pytest.mark.parametrize('block', BLOCKS)
@pytest.mark.parametrize('scenario', SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_second_crash(directory, scenario, block):
    """They also are there after a crash while a store opens what the first one left."""
    first = record(directory, scenario)
    chance = Random(f'{SEED} {scenario.__name__} {block}')
    for state in states(first, block, chance, FIRST_CRASHES):
        again = Recorder(first.directory, Path(tempfile.mkdtemp(dir=directory)))
        again.sent = dict.fromkeys(by_then(first.sent, state.crash), 0)
        again.acknowledged = dict.fromkeys(by_then(first.acknowledged, state.crash), 0)
        again.damage, again.continued = first.damage, first.continued
        if state.crash.moment >= first.kept[0]:
            again.kept = 0, first.kept[1]
        with state.placed(), again.recording():
            repair_damage(again)
            with JSONLinesStore(again.path) as store:
                again.add(store, Plant(99, 'Elm'))
        _, text = first_fault(again, block, chance, LIMIT and LIMIT // FIRST_CRASHES)
        again = f'{state}\nwas opened. {text}'
        assert not text, f'{again}\nwith CRASH_SEED={SEED} CRASH_STATES={STATES}'


class Forgetful:
    """The system calls of a store that forgets to sync, or syncs too late.

    Args:
        forgotten: The name of the call that is not made.
        late: Whether it is made when the next one is asked for.
    """

    def __init__(self, forgotten, late=False):
        self._function = getattr(os, forgotten)
        self._late = [] if late else None
        setattr(self, forgotten, self._forget)

    def __getattr__(self, name):
        return getattr(os, name)

    def _forget(self, fd):
        if self._late is not None:
            for earlier in self._late:
                self._function(earlier)
            self._late = [fd]


@pytest.mark.parametrize(
    'system',
    [Forgetful('fdatasync'), Forgetful('fsync'), Forgetful('fdatasync', late=True)],
    ids=['no sync', 'no sync of the directory', 'acknowledged before the sync'],
)
def test_forgotten_sync(directory, system):
    """A store that forgets a sync is found out."""
    recorder = record(directory, first_add, system)
    _, text = first_fault(recorder, 512, Random(SEED), 1000)
    assert text
