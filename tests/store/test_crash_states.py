"""Every state that a crash may leave of a plant file opens, and has what it must."""

import json
import os
import random
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from crash_states import Crash
from crash_states import Recorder
from crash_states import place

from store import IdTaken
from store import Plant
from store import StoreCorrupt
from store.jsonl import JSONLinesStore
from store.record import encode
from store.repair import repair

# How many states of each scenario are tried, or all.
STATES = os.environ.get('CRASH_STATES', '300')
SEED = int(os.environ.get('CRASH_SEED') or random.SystemRandom().randrange(2**32))
MIXTURES = 3  # of the index, with each state of the plant file
BLOCKS = 512, 4096
# Of a small batch, of one that fills blocks of 512 bytes, and of one of 4 KiB blocks.
FERN, MOSS, IVY = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Ivy')
LONG = [Plant(number, 'Oak' * 110) for number in range(11, 14)]
LONGER = [Plant(number, 'Ash' * 600) for number in range(21, 24)]
OTHERS = [Plant(number, 'Yew' * 80) for number in range(31, 35)]


class Killed(BaseException):
    """The process ends here, and no handler can do anything about it."""


class Process:
    """The system calls of a process that is killed when it has made one of them.

    Args:
        last: The name of that call.
    """

    def __init__(self, last):
        self._last = last
        self._killed = False

    def __getattr__(self, name):
        function = getattr(os, name)

        def call(*arguments, **options):
            if self._killed:
                raise Killed
            result = function(*arguments, **options)
            if name == self._last:
                self._killed = True
                raise Killed
            return result

        return call if callable(function) else function


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
        disk.before_sync = lambda: disk.add(other, *OTHERS)
        disk.add(store, *LONG)
        disk.add(other, *LONG, IVY)


def large_batch(disk, opened):
    """A batch of many blocks, and a small one."""
    with opened() as store:
        disk.add(store, *LONGER)
        disk.add(store, *LONG, FERN)


def killed_process(disk, opened):
    """A process dies when it has written, and another one hears the same plants."""
    for last in 'pwrite', 'fdatasync':
        process = opened(Process(None))
        with opened() as store:
            disk.add(process, FERN)
            disk.add(store, MOSS)
            process._system._last = last
            with suppress(Killed):
                disk.add(process, *LONG)
            disk.add(store, LONG[1])
            disk.add(store, *OTHERS, *LONG)


def torn_tail(disk, opened):
    """A torn tail is cut off, and another plant comes in its place."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
    disk.send(*LONGER)
    disk.append(lines(*LONGER)[:5000])
    disk.settle()
    with opened() as store:
        disk.add(store, MOSS)
        disk.add(store, *OTHERS)


def gap(disk, opened):
    """A torn tail that is a lost block and sound records of its batch."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
    disk.send(*LONGER, IVY)
    batch = lines(*LONGER, IVY)
    disk.append(bytes(600) + batch[600:])
    disk.settle()
    with opened() as store:
        disk.add(store, MOSS)
        disk.add(store, *OTHERS)


def torn_tail_while_open(disk, opened):
    """A process finds what another one has left behind."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
        disk.send(*LONGER)
        disk.append(lines(*LONGER)[:5000])
        disk.add(store, MOSS)
        disk.add(store, *OTHERS)


def index_built(disk, opened):
    """A file without an index."""
    with opened() as store:
        disk.add(store, FERN, *LONG, *OTHERS)
    for index in disk.directory.glob('*.index*'):
        os.unlink(index)
    disk.settle()
    with opened() as store:
        store.ping()
        disk.add(store, MOSS)


def repaired(disk, opened):
    """A line that a person has damaged is moved out of the file."""
    with opened() as store:
        disk.add(store, FERN, *LONG)
    disk.damage = b'{"id":7,"name":"Pe\n'
    disk.append(disk.damage + lines(*OTHERS))
    disk.send(*OTHERS)
    disk.settle()
    repair(disk.path)
    with opened() as store:
        disk.add(store, MOSS)


SCENARIOS = [
    first_add,
    batches,
    large_batch,
    killed_process,
    torn_tail,
    gap,
    torn_tail_while_open,
    index_built,
    repaired,
]


@pytest.fixture
def directory():
    """A directory in memory if there can be one: thousands of files are written."""
    memory = '/dev/shm'
    with tempfile.TemporaryDirectory(
        dir=memory if os.path.isdir(memory) else None
    ) as directory:
        yield Path(directory)


def record(directory, scenario, system=os):
    """Return what a recorder has seen of a scenario."""
    (directory / 'store').mkdir()
    (directory / 'kept').mkdir()
    recorder = Recorder(directory / 'store', directory / 'kept')

    def opened(system=system):
        return JSONLinesStore(recorder.path, system=system)

    with recorder.recording():
        scenario(recorder, opened)
    return recorder


def raw_plants(path):
    """Return the plants of a sound file by their id, read without the store's code."""
    content = path.read_bytes()
    assert not content or content.endswith(b'\n')
    plants = [Plant(**json.loads(line)) for line in content.split(b'\n')[:-1]]
    by_id = {plant.id: plant for plant in plants}
    assert [by_id[plant.id] for plant in plants] == plants, 'an id is there twice'
    return by_id


def check(recorder, state):
    """Open a state, and find what was acknowledged and nothing that nobody sent."""
    place(recorder, state)
    path = recorder.path
    by_then = lambda moments: {p for p, at in moments.items() if at <= state.moment}
    sent, acknowledged = by_then(recorder.sent), by_then(recorder.acknowledged)
    new = Plant(0, 'New')
    if recorder.damage and recorder.damage in path.read_bytes():
        with JSONLinesStore(path) as store, pytest.raises(StoreCorrupt):
            store.ping()
        repair(path)
    with JSONLinesStore(path) as store:
        store.add_many([])  # it opens
        found = set(raw_plants(path).values())
        assert found >= acknowledged, f'lost: {acknowledged - found}'
        assert found <= sent, f'nobody sent {found - sent}'
        there = sorted(found)
        fakes = [plant._replace(name='Fake') for plant in there]
        told = store.add_many([*there, *fakes, new])
        assert told[: len(there)] == [False] * len(there)
        taken = [isinstance(one, IdTaken) for one in told[len(there) : -1]]
        assert taken == [True] * len(there), 'an id is given twice'
        assert told[-1] is True
    assert set(raw_plants(path).values()) == {*there, new}


def fault(recorder, state):
    """Return what is wrong with a state, or ``None``."""
    try:
        check(recorder, state)
    except Exception as ex:
        return f'{type(ex).__name__}: {ex}'[:500]
    return None


def states(recorder, block, chance, limit):
    """Yield crashes and states, none twice; all of them, or some that chance takes."""
    crashes = [Crash(recorder, at, block) for at in range(len(recorder.calls))]
    if limit is None:
        found = (
            (crash, state) for crash in crashes for state in crash.all(chance, MIXTURES)
        )
    else:
        # Later moments are not more interesting than those with many choices.
        weights = [1 + len(crash.questions) for crash in crashes]
        taken = chance.choices(crashes, weights, k=limit)
        found = ((crash, crash.sample(chance)) for crash in taken)
    seen = set()
    for crash, state in found:
        told = sum(at <= crash.moment for at in recorder.acknowledged.values())
        key = hash((tuple(state.files.items()), told))
        if key not in seen:
            seen.add(key)
            yield crash, state


def first_fault(recorder, block, chance, limit):
    """Return the number of states tried, and the smallest description of a fault."""
    count = 0
    for crash, state in states(recorder, block, chance, limit):
        count += 1
        if fault(recorder, state):
            state = smallest(crash, state, lambda state: fault(recorder, state))
            return count, f'{crash.describe(state)}\n{fault(recorder, state)}'
    return count, None


def smallest(crash, state, fails):
    """Return a state that still fails, and of which no choice can be left out."""
    for key in state.choices:
        fewer = {other: n for other, n in state.choices.items() if other != key}
        if fails(crash.state(fewer)):
            return smallest(crash, crash.state(fewer), fails)
    return state


@pytest.mark.parametrize('block', BLOCKS)
@pytest.mark.parametrize('scenario', SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_crash(directory, scenario, block, record_property):
    """Acknowledged plants are there after a crash at any moment of a scenario."""
    recorder = record(directory, scenario)
    chance = random.Random(f'{SEED} {scenario.__name__} {block}')
    limit = None if STATES == 'all' else int(STATES)
    count, text = first_fault(recorder, block, chance, limit)
    record_property('states', count)
    assert text is None, f'{text}\nCRASH_SEED={SEED} CRASH_STATES={STATES}'
