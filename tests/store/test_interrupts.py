"""A caller that is interrupted at any moment leaves a whole store behind.

A *sweep* repeats one call and interrupts it at each point where CPython delivers what a
signal handler raises, a point further each time, until the call ends first. The
contract of stores sweeps ``add`` by threads; here are greenlets, and every method.
"""

import itertools
import os
import sys
from contextlib import suppress
from functools import partial

import gevent
import pytest
from contract import ends_before
from greenlet import getcurrent
from waiting import wait_until

from serving.scheduler import GeventScheduler
from store import Plant, StoreClosed, open_store

NO_POINT = 10**6  # more points than a call has


def in_use():
    """Return how many threads run, and how many descriptors are open."""
    return len(sys._current_frames()), len(os.listdir('/dev/fd'))


def is_released(before):
    """Whether no more is in use than before."""
    return all(map(int.__le__, in_use(), before))


USES = {
    'add': lambda store, plants: store.add(plants[0]),
    'add_many': lambda store, plants: store.add_many(plants),
    'ping': lambda store, plants: store.ping(),
    'close': lambda store, plants: store.close(),
    # In the thread of its caller: it leaves what a crash leaves, but for a descriptor.
    'load': lambda store, plants: store.load(),
}


def sweep(open_one, use):
    """Interrupt a use at every point; check the store each time."""
    # A load makes the thousands of arrays of an index.
    step = 499 if use == 'load' else 1
    ids, acknowledged = itertools.count(), set()
    with open_one() as other:
        # First without an interrupt.
        for point in itertools.chain([NO_POINT], itertools.count(0, step)):
            store = open_one()
            if use != 'add':  # which opens it
                store.ping()
            *plants, others = (Plant(next(ids), use) for _ in range(3))
            ended = ends_before(point, partial(USES[use], store, plants), getcurrent)
            if ended and 'add' in use:
                acknowledged.update(plants[: 1 + (use == 'add_many')])
            # Others go on, and so does this store. An add that hangs raises after 5 s.
            assert other.add(others)
            acknowledged.add(others)
            with suppress(*[StoreClosed] * (use == 'close')):
                assert store.add(others) is False
            store.close()
            if point == NO_POINT:
                before = in_use()
            elif use != 'load':
                wait_until(partial(is_released, before), f'{point}: all is released')
            stored = list(other)
            assert len({plant.id for plant in stored}) == len(stored)
            assert acknowledged <= {*stored}
            assert {*stored} - acknowledged <= {*plants}
            acknowledged.update(stored)
            if ended and point != NO_POINT:
                break
    assert point > 5


@pytest.mark.parametrize('use', USES)
def test_caller_is_interrupted_at_every_point(use, path):
    """Wherever the caller of a method is interrupted, the store stays whole."""
    open_one = partial(open_store, f'jsonl:{path}', scheduler=GeventScheduler())
    gevent.spawn(sweep, open_one, use).get()
