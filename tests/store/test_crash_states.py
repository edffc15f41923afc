"""Open the states that a crash may leave: no acknowledged plant is lost."""

import errno
import itertools
import logging
import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random, SystemRandom
from unittest import mock

import pytest
from crash_states import Crash, Recorder
from disk import (
    Disk,
    Fault,
    Killed,
    another_process,
    failure,
    installed,
    lines,
    path_of,
    raw_plants,
)

from store import IdTaken, Plant, StoreCorrupt, StoreUnavailable
from store.jsonl import JSONLinesStore, index, table
from store.jsonl.repair import verify

# How many states of most scenarios are tried, or "all".
STATES = os.environ.get('CRASH_STATES', '40')
LIMIT = None if STATES == 'all' else int(STATES)
SEED = int(os.environ.get('CRASH_SEED') or SystemRandom().randrange(2**32))
# How many crashes of each scenario are followed by a second crash.
FIRST_CRASHES = 4 if LIMIT else 50
MIXTURES = 3  # random states of the index for each state of the plant file
BLOCKS = 512, 4096
NEW = Plant(0, 'New')
# Plants for small batches, for batches of some 512-byte blocks and of 4 KiB blocks.
FERN, MOSS, IVY = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Ivy')
LONG = [Plant(number, 'Oak' * 110) for number in range(11, 14)]
LONGER = [Plant(number, 'Ash' * 600) for number in range(21, 24)]
OTHERS = [Plant(number, 'Yew' * 80) for number in range(31, 35)]


def new_store(disk, opened):
    """Batches of one plant, of many blocks and of some, in a new store."""
    with opened() as store:
        disk.add(store, FERN)
        disk.add(store, *LONGER)
        disk.add(store, *LONG, MOSS)


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


def killed_process(disk, opened):
    """A process is killed after a write or a sync; another adds the same plants."""
    for last, plants in ('pwrite', LONG), ('fdatasync', OTHERS):
        killed = opened(process := Disk(disk.path))
        with opened() as store:
            disk.add(killed, FERN)
            disk.add(store, MOSS)
            add_and_be_killed(disk, killed, process, *plants, last=last)
            disk.add(store, plants[1])
            disk.add(store, IVY, *plants)


def add_and_be_killed(disk, killed, process, *plants, last='pwrite'):
    """Add plants by a process that is killed after the last call on the plant file."""
    reached = []

    def kill(name, target, *arguments):
        if reached:
            raise Killed
        if name == last and path_of(target) == str(process.plants):
            reached.append(name)
            if name == 'pwrite':
                raise Killed(written=len(arguments[0]))

    process.before = kill
    with suppress(Killed):
        disk.add(killed, *plants)


def killed_last_process(disk, opened):
    """A process is killed after a write, and the next one opens the file."""
    killed = opened(process := Disk(disk.path))
    disk.add(killed, FERN)
    add_and_be_killed(disk, killed, process, *LONG, LONGER[0])
    with opened() as store:
        store.ping()
        disk.add(store, LONG[1])
        disk.add(store, IVY)


def killed_before_a_close(disk, opened):
    """A process is killed after a write, and the last one closes the file."""
    killed = opened(process := Disk(disk.path))
    with opened() as store:
        disk.add(store, FERN)
        disk.add(killed, MOSS)
        add_and_be_killed(disk, killed, process, *LONG, *LONGER)


def random_kills(disk, opened):
    """Random processes, which are killed at random calls, add random plants."""
    chance = Random(SEED)
    plants = [FERN, MOSS, IVY, *LONG, *OTHERS, *LONGER]
    remaining = written = 0  # calls, and bytes of a write

    def kill(*call):
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise Killed(written)

    for _ in range(5):
        process = Disk(disk.path)
        remaining, written = chance.randrange(40), chance.randrange(900)
        process.before = kill
        store = opened(process)
        with suppress(Killed):
            for _ in range(2):
                disk.add(store, *chance.sample(plants, 2))
            if chance.random() < 0.5:
                store.close()
    with opened() as store:
        disk.add(store, OTHERS[0])


def torn_tail(disk, opened):
    """A torn tail is cut off, and another plant is written in its place."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
    disk.send(*LONGER)
    torn = lines(*LONGER)[:3000]  # one whole line, and a part of the next
    disk.append(torn)
    disk.keep(torn.rpartition(b'\n')[2])
    with opened() as store:
        disk.add(store, MOSS)
        disk.add(store, *OTHERS)


def lost_block(disk, opened):
    """A torn tail that consists of a lost block and sound records of its batch."""
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
    """A process cuts off the torn tail that another one has left."""
    for plants in OTHERS, [MOSS]:
        with opened() as store:
            disk.add(store, FERN, *LONG)
            disk.send(*LONGER)
            disk.append(lines(*LONGER)[:3000])
            disk.add(store, *plants)
            disk.add(store, IVY)


def full_disk(disk, opened):
    """A write that fails in the middle, and another write in its place."""
    process = Disk(disk.path)
    room = [3000]

    def fill(*arguments):
        if not room:
            raise failure(errno.ENOSPC)
        return room.pop()

    with opened(process) as store:
        disk.add(store, FERN, *LONG)
        process.before = Fault('pwrite', 1, fill, lasting=True)
        disk.send(*LONGER)
        with pytest.raises(StoreUnavailable):
            disk.add(store, *LONGER)
        process.resume()
        disk.add(store, *OTHERS)
        disk.add(store, IVY)


def index_built(disk, opened):
    """The index of a file is missing, and is built."""
    with opened() as store:
        disk.add(store, FERN, *LONG, *OTHERS)
    for path in disk.directory.glob('*.index*'):
        os.unlink(path)
    disk.settle()
    with opened() as store:
        store.ping()
        disk.add(store, MOSS)


def flushes(disk, opened):
    """Two processes flush their recent ids; checkpoints come now and then."""
    numbers = itertools.count(41)

    def flush_during_a_sync():
        assert store._backend()._index.flush()

    frequent = mock.patch.object(index, 'MOST_RECENT', 3)
    with frequent, opened() as store, opened() as other:
        for process in store, other:
            process.ping()
        disk.before_sync = flush_during_a_sync
        for process in store, other, store, store, other:
            pages = 1000 if process is store else 1
            with mock.patch.object(table, 'CHECKPOINT_PAGES', pages):
                disk.add(process, *(Plant(next(numbers), 'Fir' * 99) for _ in range(3)))
        disk.before_sync = None


def repaired(disk, opened):
    """A line that a person has damaged is moved out of the file."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
    disk.damage = b'{"id":7,"name":"Pe\n'
    disk.send(*OTHERS)
    disk.append(disk.damage + lines(*OTHERS))
    disk.keep(disk.damage)
    verify(disk.path, repair=True)
    with opened() as store:
        disk.add(store, MOSS)


SCENARIOS = [
    *(killed_process, killed_last_process, killed_before_a_close, random_kills),
    *(torn_tail, lost_block, full_disk, torn_tail_while_open),
    *(new_store, batches, index_built, flushes, repaired),
]


@pytest.fixture(scope='module')
def directory():
    """Return a function that makes a directory."""
    logging.disable()  # pytest would keep all of it
    with tempfile.TemporaryDirectory() as parent:
        yield lambda: Path(tempfile.mkdtemp(dir=parent))
    logging.disable(logging.NOTSET)


@pytest.fixture(scope='module', params=SCENARIOS, ids=lambda one: one.__name__)
def recorder(request, directory):
    """The recorder of a scenario, for all tests of its states."""
    recorder = record(directory, request.param)
    # Only 2 of 100 states of these show that a cut or a rollback is not synced.
    recorder.factor = 3 if request.param in (lost_block, full_disk) else 1
    return recorder


def record(directory, scenario):
    """Run a scenario; return its recorder."""
    recorder = Recorder(directory(), directory())

    with ExitStack() as afterwards:

        def opened(process=None):
            if process is None:
                return JSONLinesStore(recorder.path)
            store = another_process(process)(recorder.path)
            afterwards.callback(store.close)
            afterwards.callback(process.resume)
            return store

        with recorder.recording():
            scenario(recorder, opened)
    return recorder


def stored_in(path):
    """Return the plants of a sound file; a plant may be there twice, but no id."""
    plants = raw_plants(path.read_bytes())
    assert len({plant.id for plant in plants}) == len(set(plants)), 'an id is twice'
    return set(plants)


def repair_damage(recorder):
    """Run the repair that a damaged file asks for, if the scenario damaged it."""
    path, damage = recorder.path, recorder.damage
    if damage and path.exists() and damage in path.read_bytes():
        with JSONLinesStore(path) as store, pytest.raises(StoreCorrupt):
            store.ping()
        verify(path, repair=True)


def check(crash):
    """Open what a crash left: acknowledged plants are there, unknown ones are not."""
    recorder, path = crash.recorder, crash.recorder.path
    repair_damage(recorder)
    left = path.read_bytes() if path.exists() else b''
    with JSONLinesStore(path) as store:
        store.add_many([])  # it opens
        found = stored_in(path)
        whole = path.read_bytes()
        sides = [side.read_bytes() for side in path.parent.glob('plants.jsonl.*-[0-9]')]
        assert whole == left or left.removeprefix(whole) in sides, 'bytes are gone'
        moment, kept = recorder.kept
        if crash.moment >= moment:
            assert any(kept in data for data in [whole, *sides]), 'bytes are gone'
        acknowledged = by_then(recorder.acknowledged, crash)
        assert found >= acknowledged, f'lost: {acknowledged - found}'
        unknown = found - by_then(recorder.sent, crash)
        assert not unknown, f'nobody sent {unknown}'
        plants = sorted(found)
        fakes = [plant._replace(name='Fake') for plant in plants]
        outcomes = store.add_many([*plants, *fakes, NEW])
        assert outcomes[: len(plants)] == [False] * len(plants)
        taken = [isinstance(one, IdTaken) for one in outcomes[len(plants) : -1]]
        assert taken == [True] * len(plants), 'an id is given twice'
        assert outcomes[-1] is True
    assert path.read_bytes().startswith(whole)
    assert NEW in stored_in(path)


def by_then(moments, crash):
    """Return the plants whose moment is not after the crash."""
    return {plant for plant, moment in moments.items() if moment <= crash.moment}


def fault(state):
    """Return what is wrong after opening a state, or ``None``."""
    try:
        state.place()
        check(state.crash)
    except Exception as ex:
        return f'{type(ex).__name__}: {ex}'[:500]
    return None


def states(recorder, block, chance, limit):
    """Yield different states: all of them, or ``limit`` random ones."""
    moments = range(recorder.begun, len(recorder.calls))
    crashes = [Crash(recorder, moment, block) for moment in moments]
    if limit is None:
        found = (it for one in crashes for it in one.all_states(chance, MIXTURES))
    else:
        # More states of the moments at which more may have been lost.
        weights = [1 + len(crash.questions) for crash in crashes]
        taken = chance.choices(crashes, weights, k=5 * limit)
        found = (crash.random_state(chance) for crash in taken)
    seen = set()
    for state in found:
        # With as many promised plants.
        key = *state.files.items(), len(by_then(recorder.acknowledged, state.crash))
        if (key := hash(key)) not in seen:
            seen.add(key)
            yield state
            if len(seen) == limit:
                break


def first_fault(recorder, block, chance, limit):
    """Return what is wrong with the first state that shows a fault, if any."""
    for state in states(recorder, block, chance, limit):
        if fault(state):
            state = state.smallest(fault)
            return (
                f'{state}\n{fault(state)}\nwith CRASH_SEED={SEED} CRASH_STATES={STATES}'
            )
    return ''


@pytest.mark.parametrize('block', BLOCKS)
def test_acknowledged_plants_survive_a_crash(recorder, block):
    """After a crash at any moment of a scenario no acknowledged plant is lost."""
    chance = Random(f'{SEED} {block}')
    found = first_fault(recorder, block, chance, LIMIT and LIMIT * recorder.factor)
    assert not found, found


@pytest.mark.parametrize('block', BLOCKS)
def test_acknowledged_plants_survive_a_second_crash(directory, recorder, block):
    """A second crash, while a store opens after the first one, loses none either."""
    chance = Random(f'{SEED} {block}')
    for state in states(recorder, block, chance, FIRST_CRASHES):
        again = Recorder(recorder.directory, directory())
        crash = state.crash
        again.sent = dict.fromkeys(by_then(recorder.sent, crash), 0)
        again.acknowledged = dict.fromkeys(by_then(recorder.acknowledged, crash), 0)
        again.damage = recorder.damage
        if crash.moment >= recorder.kept[0]:
            again.kept = 0, recorder.kept[1]
        state.place()
        with again.recording():
            repair_damage(again)
            with JSONLinesStore(again.path) as store:
                again.add(store, Plant(99, 'Elm'))
        found = first_fault(again, block, chance, LIMIT and LIMIT // 8)
        assert not found, f'{state}\nwas opened. {found}'


@pytest.mark.parametrize('forgotten', ['fdatasync', 'fsync'])
def test_missing_sync_is_detected(directory, forgotten):
    """The generator finds a state that shows a missing sync: of data, of names."""

    def skip(fd):
        if forgotten == 'fsync' and not os.path.isdir(path_of(fd)):
            os.fsync(fd)

    with installed(Disk('')) as system:
        setattr(system, forgotten, skip)
        recorder = record(directory, new_store)
    assert first_fault(recorder, 512, Random(SEED), 1000)
