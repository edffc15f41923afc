"""An exception at every call and return of the committer: state moves last.

A *sweep* repeats one use, and raises an error at one event of its thread, another one
each time: a call or a return of a function, or a call of C. Whatever was known before
is known afterwards, and the store goes on. ``make crash`` tries all events.
"""

import errno
import fcntl
import logging
import os
import random
import sys
from contextlib import suppress
from functools import partial

import pytest
from contract import FORK, at_once
from disk import append, assert_raise, assert_stored, fill, lines, raw_plants

from store import THREADS, IdTaken, Plant, Scheduler, StoreUnavailable
from store.jsonl import JSONLinesStore

# A file that an error keeps from being closed is closed when it is collected.
pytestmark = [
    pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
    pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning'),
]

STATES = int(os.environ.get('CRASH_STATES', '400'))
SEED = int(os.environ.get('CRASH_SEED') or random.SystemRandom().randrange(2**32))
CALLS = [os.pread, os.pwrite, os.open, os.fstat, os.stat, os.fdatasync, fcntl.flock]
FERN, MOSS, NEXT = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Next')
OTHERS = [Plant(number, 'Oak' * 9) for number in range(100, 140)]
TORN = b'{"id":7,"na'


class Sweep(Scheduler):
    """Raises an error at the n-th event of a thread: any, or a call of the system."""

    def __init__(self, nth, error):
        self.nth, self.error, self.count, self.armed = nth, error, 0, False

    def profile(self, frame, event, function):
        if not self.armed or event == 'c_exception':
            return
        is_call = event == 'c_call' and any(function is each for each in CALLS)
        if is_call or self.error is MemoryError:
            self.count += 1
            if self.count == self.nth:
                raise self.error(errno.EIO, 'swept')

    def start_thread(self, function, arguments):
        def run():
            sys.setprofile(self.profile)
            function(*arguments)

        THREADS.start_thread(run, ())


def sweep(attempt, error):
    """Make an attempt with an error at each event, or at some of them."""
    whole = attempt(10**9, error)
    assert whole.count < whole.nth
    events, chance = range(1, whole.count + 1), random.Random(SEED)
    assert len(events) > 3
    for nth in events if STATES > 1000 else chance.sample(events, min(12, len(events))):
        try:
            attempt(nth, error)  # the last may not come: a wait for a lock varies
        except BaseException as ex:
            ex.add_note(f'{error}, event {nth} of {len(events)}; CRASH_SEED={SEED}')
            raise


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Have long reads of a few lines, and callers that look at once."""
    monkeypatch.setattr('store.jsonl.disk.CHUNK', 200)
    monkeypatch.setattr('store.jsonl.file.NEAR', 500)
    monkeypatch.setattr('store.committer.LOOK_EVERY', 0.01)
    logging.disable()  # a handler whose lock an error keeps would stop all threads
    yield
    logging.disable(logging.NOTSET)


# What others leave in the file: before the store is opened, or after that. Then a use,
# and what it acknowledges if it returns.
LOST = TORN.ljust(512 - len(lines(FERN)), b'\0') + b'x\n' + lines(*OTHERS)
add = partial(JSONLinesStore.add, plant=MOSS)
both = partial(JSONLinesStore.add_many, plants=[MOSS, FERN])
ONE, MANY = lines(FERN), lines(FERN, *OTHERS)
SCENARIOS = {
    'an add': (ONE, b'', add, [MOSS]),
    'several': (ONE, b'', both, [MOSS]),
    'a repeat': (ONE, b'', partial(JSONLinesStore.add, plant=FERN), []),
    'a taken id': (ONE, b'', partial(JSONLinesStore.add, plant=Plant(1, 'x')), []),
    'a ping': (ONE, b'', JSONLinesStore.ping, []),
    'first use': (MANY, None, add, [MOSS]),
    'lines of others': (ONE, lines(*OTHERS), add, [MOSS]),
    'lines of others in an empty file': (b'', MANY, add, [MOSS]),
    'a torn tail': (ONE, TORN, add, [MOSS]),
    'a lost block': (ONE + LOST, None, add, [MOSS]),
    'no line feed': (ONE, lines(MOSS)[:-1], add, [MOSS]),
}


@pytest.mark.parametrize('error', [MemoryError, OSError])
@pytest.mark.parametrize('scenario', SCENARIOS.values(), ids=SCENARIOS)
def test_committer(path, scenario, error):
    """Wherever it fails: an answer in time, no loss, no id twice, and it goes on."""
    before, after, use, adds = scenario

    def attempt(nth, error):
        for file in path.parent.iterdir():
            file.unlink()
        path.write_bytes(before)
        swept = Sweep(nth, error)
        with JSONLinesStore(path, scheduler=swept) as store:
            if after is not None:
                store.ping()
                append(path, after)
            text = path.read_bytes()
            acknowledged = [it for it in [FERN, *OTHERS] if lines(it) in text]
            swept.armed = True
            with suppress(IdTaken, *[StoreUnavailable] * (nth < 10**9)):
                use(store)
                acknowledged += adds
            swept.armed = False
            with JSONLinesStore(path) as other:
                other.ping()  # nobody holds the lock
            try:
                assert store.add(NEXT)
            except StoreUnavailable:
                assert error is OSError  # of a sync: a reload goes on
                fill(path, NEXT)
        assert_stored(path, [*acknowledged, NEXT])
        stored = raw_plants(path.read_bytes())
        assert len({plant.id for plant in stored}) == len(stored)
        return swept

    sweep(attempt, error)


@pytest.mark.parametrize('error', [MemoryError, OSError])
def test_load(path, error):
    """A reload of a replaced file that fails leaves the served store as it was."""
    path.write_bytes(MANY)
    served = JSONLinesStore(path)
    served.load()
    path.rename(path.with_name('old'))
    path.write_bytes(ONE)
    refused = partial(assert_raise, StoreUnavailable, partial(add, served))

    def attempt(nth, error):
        swept, new = Sweep(nth, error), JSONLinesStore(path)
        swept.armed = True
        try:
            sys.setprofile(swept.profile)
            new.load()
        except (MemoryError, StoreUnavailable):
            pass
        finally:
            swept.armed = False
            sys.setprofile(None)
        assert path.read_bytes() == ONE
        return swept

    sweep(attempt, error)
    at_once(FORK.Process, refused)
