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
    """Interrupt a use at every point; check each time that others go on."""
    given, others, ended = [], [], False
    with open_one() as other:
        other.ping()
        before = in_use()
        # A load makes the thousands of arrays of an index.
        points = itertools.count(0, 499 if use == 'load' else 1)
        while not ended:
            store, point = open_one(), next(points)
            if use != 'add':  # which opens it
                store.ping()
            given += [Plant(-2 * point - 1, use), Plant(-2 * point - 2, use)]
            others.append(Plant(point, 'Moss'))
            call = partial(USES[use], store, given[-2:])
            ended = ends_before(point, call, getcurrent)
            # An add that hangs raises after 5 s.
            assert other.add(others[-1])
            with suppress(*[StoreClosed] * (use == 'close')):
                assert store.add(others[-1]) is False
            store.close()
            if use != 'load':
                wait_until(lambda: in_use() <= before, f'{point}: all is released')
        stored = list(other)
    added = given[-2:][: {'add': 1, 'add_many': 2}.get(use, 0)]
    assert len({plant.id for plant in stored}) == len(stored)
    assert {*others, *added} <= {*stored} <= {*others, *given}
    assert point > 5


@pytest.mark.parametrize('use', USES)
def test_caller_is_interrupted_at_every_point(use, path):
    """Wherever the caller of a method is interrupted, the store stays whole."""
    open_one = partial(open_store, f'jsonl:{path}', scheduler=GeventScheduler())
    gevent.spawn(sweep, open_one, use).get()
