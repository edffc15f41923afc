"""Open what a crash may leave: no acknowledged plant is lost, no id is given twice."""

import errno
import itertools
import json
import logging
import os
from contextlib import ExitStack, suppress
from functools import partial
from random import Random, SystemRandom

import pytest
from disk import Disk, Fault, assert_stored, crash, failing, full, installed, lines
from exchange import table
from machine import open_files

from store import Plant, StoreCorrupt, StoreUnavailable
from store.jsonl import JSONLinesStore
from store.jsonl.repair import verify

# How many states of a scenario are drawn; many come again, and are not opened twice.
STATES = int(os.environ.get('CRASH_STATES', '1000'))
SEED = int(os.environ.get('CRASH_SEED') or SystemRandom().randrange(2**32))
FERN, MOSS, IVY = map(Plant, range(1, 4), ['Fern', 'Moss', 'Ivy'])
# For batches of some 512-byte blocks, and of 4 KiB blocks.
LONG = [Plant(number, 'Oak' * 110, 'shade') for number in range(11, 14)]
LONGER = [Plant(number, 'Ash' * 600) for number in range(21, 24)]
OTHERS = [Plant(number, 'Yew' * 80) for number in range(31, 35)]
# A long line that is torn, and as many bytes of short ones in its place.
GIANT = Plant(24, 'Ash' * 1500)
MANY = [Plant(number, 'Elm' * 110) for number in range(51, 63)]
# A plant within the text of another: a part of its line could be a record.
NESTED = [Plant(id, f'"}}{{"id":1,"name":"Elm"}}{id}' * 20) for id in (41, 42)]


class Run(ExitStack):
    """What happens to a plant file, and what its clients have sent and were told."""

    def __init__(self, directory):
        super().__init__()
        self.path = directory / 'plants.jsonl'
        self.disk = self.enter_context(installed(Disk(self.path)))
        self.sent = set()
        self.acknowledged = {}  # the moment of each plant
        self.kept = 0, b''  # a moment, and what some file must hold from then on
        self.is_damaged = False  # whether a repair may be needed

    def open(self):
        """Open another store, as another process."""
        return self.enter_context(JSONLinesStore(self.path))

    def add(self, store, *plants):
        """Add plants in one batch; note that they are acknowledged."""
        self.sent.update(plants)
        outcomes = store.add_many(plants)
        assert all(isinstance(new, bool) for new in outcomes), outcomes
        self.disk.calls.append(f'{len(plants)} acknowledged')
        for plant in plants:
            self.acknowledged.setdefault(plant, self.disk.now)

    def append(self, data, *plants, kept=b''):
        """Append what another process was writing, or damage; ``kept`` is durable."""
        self.sent.update(plants)
        with self.path.open('rb+') as file:
            self.disk.pwrite(file.fileno(), data, self.path.stat().st_size)
            if kept:
                self.disk.fdatasync(file.fileno())
                self.kept = self.disk.now, kept

    def told_by(self, moment):
        """Return the plants that were acknowledged by a moment."""
        return {plant for plant, at in self.acknowledged.items() if at <= moment}


def batches(run):
    """A new store, and batches of any size of two processes, which overlap."""
    store, other = run.open(), run.open()
    run.add(store, FERN)
    run.add(store, *LONGER)
    other.ping()

    def meanwhile(name, *arguments):
        if name == 'fdatasync':
            run.disk.resume()
            run.add(other, *OTHERS)

    run.disk.before = meanwhile  # one batch is written while the other is synced
    run.add(store, *LONG)
    run.add(other, *LONG, IVY, MOSS)


def torn_tail_while_open(run):
    """A process cuts off the torn tail that another one has left."""
    for plants in MANY, [MOSS]:
        store = run.open()
        run.add(store, FERN, *LONG)
        run.append(lines(GIANT)[:4400], GIANT)
        run.add(store, *plants)
        run.add(store, IVY)


def lost_block(run):
    """A lost block before sound records of its batch, which are kept."""
    run.add(run.open(), FERN, *LONG)
    batch = lines(*NESTED, *LONGER, IVY)
    lost = 512 - run.path.stat().st_size % 512
    batch = bytes(lost) + batch[lost:]
    # The destroyed line: other bytes of the batch are in records.
    run.append(batch, *NESTED, *LONGER, IVY, kept=batch.partition(b'\n')[0])
    store = run.open()
    run.add(store, MOSS)
    run.add(store, *OTHERS)


def full_disk(run):
    """A write that fails in the middle, and another write in its place."""
    store = run.open()
    run.add(store, FERN, *LONG)
    before = run.path.read_bytes()
    run.disk.before = Fault('pwrite', 1, full(4400), lasting=True)
    with pytest.raises(StoreUnavailable, match=os.strerror(errno.ENOSPC)):
        run.add(store, GIANT)
    assert run.path.read_bytes() == before
    run.disk.resume()
    run.add(store, *MANY)
    run.add(store, IVY)


def repaired(run):
    """Lines that a person has damaged are blanked, beside a server."""
    store = run.open()
    run.add(store, FERN, *LONG)
    damage = lines(*NESTED).replace(b'"name"', b'"Name"')
    run.is_damaged = True
    run.append(damage + lines(*OTHERS), *OTHERS, kept=damage)
    verify(run.path, repair=True)
    run.add(store, MOSS)


SCENARIOS = batches, torn_tail_while_open, lost_block, full_disk, repaired


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
    """Return a function that makes a directory."""
    logging.disable()  # pytest would keep all of it
    yield partial(tmp_path_factory.mktemp, 'run')
    logging.disable(logging.NOTSET)


@pytest.fixture(scope='module', params=SCENARIOS, ids=lambda one: one.__name__)
def run(request, directory):
    """A scenario, for all tests of its states."""
    with Run(directory()) as run:
        request.param(run)
    return run


def check(run, moment):
    """Open what is left: acknowledged plants are there, unknown ones are not."""
    path = run.path
    left = path.read_bytes() if path.exists() else b''
    with JSONLinesStore(path) as store:
        try:
            store.ping()
        except StoreCorrupt:
            assert run.is_damaged
            verify(path, repair=True)
        whole = path.read_bytes()
        plants = {Plant(**json.loads(it)) for it in whole.split(b'\n') if it.strip()}
        assert len({plant.id for plant in plants}) == len(plants), 'an id is twice'
        sides = [it.read_bytes() for it in path.parent.glob('plants.jsonl.*-[0-9]')]
        needed = [line for line in left.split(b'\n') if line.strip(b'\0 ')]
        since, kept = run.kept
        for line in [*needed, kept] if moment >= since else needed:
            assert any(line in data for data in [whole, *sides]), 'bytes are gone'
        for line in left.split(b'\n')[:-1]:
            with suppress(ValueError, TypeError):
                assert Plant(**json.loads(line)) in plants, 'a record was cut'
        assert run.told_by(moment) <= plants, 'a plant is lost'
        assert plants <= run.sent, 'nobody sent it'
        assert_stored(store, [*plants], free=[0])


def left_by_crashes(run):
    """Put random states in place of the files, each once; yield their moments."""
    chance, seen = Random(SEED), set()
    for moment in chance.choices(range(len(run.disk.calls)), k=STATES):
        # All new, all old, runs of both, or any mixture.
        is_old = chance.choice([False, True])
        turns = chance.choice([0.1, 0.5])

        def pick(kinds, turns=turns):
            nonlocal is_old
            is_old ^= chance.random() < turns
            return chance.choice(kinds[1:] or kinds) if is_old else kinds[0]

        state = crash(run.disk, moment, chance.choice([512, 4096]), pick)
        # With as many promised plants.
        key = hash((*sorted(state.items()), len(run.told_by(moment))))
        if key not in seen:
            seen.add(key)
            place(run.path, state)
            yield moment


def place(path, state):
    """Replace the files of a directory."""
    for entry in path.parent.iterdir():
        entry.unlink()
    for name, content in state.items():
        path.with_name(name).write_bytes(content)


def test_acknowledged_plants_survive_a_crash(run):
    """At any moment; in most scenarios it is a second one, while a store mends."""
    for moment in left_by_crashes(run):
        try:
            check(run, moment)
        except Exception as ex:
            calls = '\n'.join(run.disk.calls[: moment + 1])
            ex.add_note(f'{calls}\nCRASH_SEED={SEED} CRASH_STATES={STATES}')
            raise


def nothing(run):
    """Start without a plant file."""


def torn_tail(run):
    """Start with the file of a process that was killed before its sync."""
    run.add(run.open(), FERN)
    run.append(lines(MOSS, IVY)[:-9], MOSS)


def lost_beginning(run):
    """Start as after a power cut: a block of a batch is lost, and the next is there."""
    run.add(run.open(), FERN)
    lost = 512 - run.path.stat().st_size
    run.append(bytes(lost) + lines(*LONG)[lost:], *LONG)


CALLS = ['open', 'fstat', 'pread', 'pwrite', 'fdatasync', 'fsync', 'ftruncate']
CALLS += ['unlink']
# The store tells only ENOENT and what a file system lacks from the rest.
EFFECTS = {call: (call, failing(errno.EIO)) for call in CALLS}
EFFECTS['pwrite-short'] = 'pwrite', lambda fd, data, offset: max(1, len(data) // 2)
EFFECTS['pwrite-nothing'] = 'pwrite', lambda *arguments: 0
EFFECTS['any'] = '', failing(errno.EIO)  # lasting, it is a process that is killed


@pytest.mark.parametrize('lasting', [False, True], ids=['once', 'lasting'])
@table('call, effect', EFFECTS)
@pytest.mark.parametrize('prepare', [nothing, torn_tail, lost_beginning])
def test_failing_call_loses_nothing(directory, prepare, call, effect, lasting):
    """Whichever call fails: as if the process is killed then, or the power is cut."""
    # Each fifth of many calls.
    for nth in itertools.count(1, 5 if call in ('pread', '') else 1):
        with Run(directory()) as run:
            prepare(run)
            run.disk.before = fault = Fault(call, nth, effect, lasting)
            for plants in 2 * [[FERN, MOSS, FERN, IVY]]:
                # The constructor may fail to make the file.
                with suppress(StoreUnavailable), JSONLinesStore(run.path) as store:
                    for plant in plants:
                        with suppress(StoreUnavailable):
                            run.add(store, plant)
        directory_of_run = str(run.path.parent)
        assert not any(it.startswith(directory_of_run) for it in open_files().values())
        now = run.disk.now
        check(run, now)
        place(run.path, crash(run.disk, now, 512, lambda kinds: kinds[-1]))
        check(run, now)
        if not fault.reached:
            break
    assert {*run.acknowledged} == {FERN, MOSS, IVY}
