"""A caller that is interrupted at any moment leaves a whole store behind.

A *sweep* repeats one call and interrupts it at each point where CPython delivers what a
signal handler raises, a point further each time, until the call ends first. The
contract of stores sweeps ``add`` by threads; here are greenlets, and every method.
"""

import itertools
import sys
from contextlib import suppress
from functools import partial

import gevent
import pytest
from contract import ends_before, open_files
from greenlet import getcurrent
from waiting import wait_until

from serving.scheduler import GeventScheduler
from store import Plant, StoreClosed, open_store

USES = {
    'add': lambda store, plants: store.add(plants[0]),
    'add_many': lambda store, plants: store.add_many(plants),
    'ping': lambda store, plants: store.ping(),
    'close': lambda store, plants: store.close(),
    # In the thread of its caller: it leaves what a crash leaves, but for a descriptor.
    'load': lambda store, plants: store.load(),
}


def in_use():
    """Return how many threads run and how many files are open."""
    return len(sys._current_frames()) + len(open_files())


def sweep(open_one, use):
    """Interrupt a use at every point; check the store each time."""
    # A load makes the thousands of arrays of an index.
    points = itertools.count(0, 499 if use == 'load' else 1)
    ids, acknowledged, ended = itertools.count(), set(), False
    with open_one() as other:
        other.ping()
        before = in_use()
        while not ended:
            store = open_one()
            if use != 'add':  # which opens it
                store.ping()
            *plants, others = (Plant(next(ids), use) for _ in range(3))
            point, call = next(points), partial(USES[use], store, plants)
            ended = ends_before(point, call, getcurrent)
            if ended and 'add' in use:
                acknowledged.update(plants[: 1 + (use == 'add_many')])
            # Others go on, and so does this store. An add that hangs raises after 5 s.
            assert other.add(others)
            acknowledged.add(others)
            with suppress(*[StoreClosed] * (use == 'close')):
                assert store.add(others) is False
            store.close()
            if use != 'load':
                wait_until(lambda: in_use() <= before, f'{point}: all is released')
            stored = list(other)
            assert len({plant.id for plant in stored}) == len(stored)
            assert acknowledged <= {*stored} <= acknowledged | {*plants}
            acknowledged.update(stored)
    assert point > 5


@pytest.mark.parametrize('use', USES)
def test_caller_is_interrupted_at_every_point(use, path):
    """Wherever the caller of a method is interrupted, the store stays whole."""
    open_one = partial(open_store, f'jsonl:{path}', scheduler=GeventScheduler())
    gevent.spawn(sweep, open_one, use).get()
