"""The tests that every store of plants must pass: a specification.

Whoever writes a store copies this file. A subclass of ``StoreContract`` has a fixture
``store``, which makes an empty store that was not used yet: see
``docs/example_store/test_plants_in_sqlite.py``. A store that has a ``url`` is opened
again by ``open_store``, also in other processes, so its package must be installed.

The docstring of a test is the promise that it checks, with its number in the docstring
of ``PlantStore``; pytest shows it with a failure.
"""

import gc
import itertools
import multiprocessing
import os
import random
import sys
import threading
from contextlib import nullcontext, suppress
from enum import Enum
from functools import cache, partial
from pathlib import Path

import pytest

from store import THREADS, IdTaken, Plant, StoreClosed, StoreUnavailable, open_store

PATIENCE = float(os.environ.get('PATIENCE', '60'))  # seconds; then something hangs
FORK = multiprocessing.get_context('fork')

TEXTS = Plant._fields[1:]  # the members that hold a text
OPTIONAL = Plant._field_defaults.keys()
FERN, MOSS = Plant(1, 'Fern'), Plant(2, 'Moss')

EDGES = [0, *(sign * 2**bits for bits in (3, 31, 32, 53, 63) for sign in (1, -1))]
NEAR = sorted({edge + near for edge in EDGES for near in (-1, 0, 1)})
IDS = [id for id in NEAR if -(2**63) <= id < 2**63]
IDS += [Enum('Id', {'ROSE': 5}, type=int).ROSE]  # an int, but not as text

# Texts that a file, a database or a program may take for something else.
HOSTILE = [
    *('', ' \t ', '  Fern  ', 'null', 'NULL', '{"a,b",NULL}', '\ufeffFern'),
    'a\nb\rc\r\nd\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\n',
    '"\\"/\'`\\\\',
    '\\u0000 \\ud800 \\n \\N \\. \\x00 %00 &#0;',
    '{"id":1,"name":"x"}\n{"id":2,"name":"y"}\n',
    "'); DROP TABLE plants; --",
    '%s %(name)s {} {0} $1 :name ?',
    '\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301',
]
# Different texts, each beside the one that it is most easily taken for.
ALIKE = ['', 'null', 'None', 'fern', 'FERN', 'fern ', 'fern\n', 'e\u0301', '\u00e9']
ALIKE += ['x' * 5000, 'x' * 5001, '\u212b', '\u00c5']

# What is no plant: a wrong id, a wrong text, a required text that is missing.
NO_PLANTS = [MOSS._replace(id=no) for no in (True, 1.0, '1', None, 2**63, -(2**63) - 1)]
NO_PLANTS += [
    MOSS._replace(**{member: no})
    for member in TEXTS
    for no in (5, b'', 'M\0', '\ud800', *([] if member in OPTIONAL else [None]))
]


@cache
def samples():
    """Return plants that have every kind of id and text, also a megabyte."""
    every = ''.join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x110000)]))
    long = [every[at : at + 2**17] for at in range(0, len(every), 2**17)]
    long += ['x' * 2**20, '\U0001f331' * 2**20, '\x01' * 2**18]
    kinds = [*itertools.product(HOSTILE, TEXTS), *zip(long, itertools.cycle(TEXTS))]
    plants = [Plant(id, *('Fern' for _ in TEXTS)) for id in IDS]
    for id, (text, member) in enumerate(kinds, 7000):
        plants.append(Plant(id, 'Fern')._replace(**{member: text}))
    return plants


def rivals():
    """Yield pairs of plants with the same id that differ in one member, or two."""
    for member in TEXTS:
        values = [None, *ALIKE] if member in OPTIONAL else ALIKE
        yield from itertools.pairwise(MOSS._replace(**{member: it}) for it in values)
    for one, other in itertools.permutations(TEXTS, 2):
        yield MOSS._replace(**{one: 'Fern'}), MOSS._replace(**{other: 'Fern'})


class Interrupted(BaseException):
    """What interrupts a caller, as Ctrl-C does."""


def at_once(kind, *jobs):
    """Run functions at once, in threads or forked children; fail if one hangs."""
    workers = [kind(target=job, daemon=True) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive(), 'it hangs'
        assert getattr(worker, 'exitcode', 0) == 0, 'a child failed'


def ends_before(point, function, current=threading.get_ident):
    """Call a function, interrupt it at a point; return whether it ended before."""
    caller, points = current(), itertools.count()

    def interrupt(frame, event, argument):
        is_point = event in ('c_return', 'call') and current() == caller
        # An interrupt in the callback of a weak reference reaches nobody.
        is_point = is_point and frame.f_globals['__name__'] != '_weakrefset'
        if is_point and next(points) == point:
            raise Interrupted

    gc.disable()  # nor does one in a callback of the garbage collector
    sys.setprofile(interrupt)
    try:
        function()
    except Interrupted:
        return False
    finally:
        sys.setprofile(None)
        gc.enable()
    return True


def uses(store):
    """Return calls that need the plants of a store."""
    add, add_many = partial(store.add, FERN), partial(store.add_many, [MOSS])
    return [store.ping, add, add_many, partial(list, store), store.load]


def goes_on(store, new, *stored):
    """Check that a process knows what is stored, and that it adds a plant."""
    for plant in stored:
        assert store.add(plant) is False
        with pytest.raises(IdTaken):
            store.add(plant._replace(name='Reed'))
    assert store.add(new)
    assert set(store) == {new, *stored}


def open_files():
    """Return the open files and sockets of this process; each name is a number."""
    return {file for file in Path('/dev/fd').iterdir() if file.exists()}


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
class StoreContract:
    """The tests of one store; a subclass says what they must know of it."""

    scheduler = THREADS

    def raw_plants(self, store):
        """Return the plants of a store, open or not, read without its code."""
        raise NotImplementedError

    def url(self, store):
        """Return the URL of the store, or ``None`` if its plants die with it."""

    def unavailable(self, store):
        """Return a context in which every add fails."""
        pytest.skip('nothing can make this store unavailable')

    def assert_holds(self, store, *plants):
        """Check which plants are stored, with the code of the store and without it."""
        assert sorted(self.raw_plants(store)) == sorted(plants)
        assert sorted(store) == sorted(plants)

    def test_added_plants_are_kept(self, store):
        """1. When ``add`` returns, the plant is durable: any id, any text, a megabyte.

        Added again, by another object too, it returns ``False``. 2. When it raises
        ``IdTaken``, a different plant holds that id and the store is unchanged.
        """
        chance, plants = random.Random(1), {}
        pairs = [[*pair] for pair in rivals()]
        given = [it._replace(id=id) for id, pair in enumerate(pairs) for it in pair]
        given += [*samples(), *samples()]
        chance.shuffle(given)
        self.assert_holds(store)
        for plant in given:
            is_new = plant.id not in plants
            if plants.setdefault(plant.id, plant) == plant:
                assert store.add(plant) is is_new
            else:
                with pytest.raises(IdTaken) as caught:
                    store.add(plant)
                assert caught.value.id == plant.id
            if chance.random() < 0.02:
                assert sorted(store) == sorted(plants.values())
                if url := self.url(store):
                    store.close()
                    store = open_store(url)
        self.assert_holds(store, *plants.values())
        store.close()

    def test_add_many_is_like_add(self, store):
        """``add_many`` does for each plant what ``add`` would do, in the same order."""
        new = samples()[: len(IDS)]
        taken = [plant._replace(name='Reed') for plant in new[:2]]
        outcomes = store.add_many([*new, *taken, new[0], *taken])
        shown = [getattr(outcome, 'id', outcome) for outcome in outcomes]
        refused = [plant.id for plant in taken]
        assert shown == [True] * len(new) + refused + [False] + refused
        assert store.add_many([]) == []
        self.assert_holds(store, *new)

    def test_unavailable_store_recovers(self, store):
        """3. When ``add`` raises ``StoreUnavailable``: repeat the call.

        6. ``ping`` raises what the ``add`` would raise, and so does ``load``.
        """
        store.add(FERN)
        with self.unavailable(store):
            for use in store.ping, partial(store.add, MOSS), store.load:
                with pytest.raises(StoreUnavailable):
                    use()
        store.ping()
        store.add(MOSS)
        self.assert_holds(store, FERN, MOSS)

    @pytest.mark.parametrize('kind', [threading.Thread, FORK.Process])
    def test_adds_at_once(self, store, kind):
        """4. ``add`` may be called from many threads, and from many processes.

        Each id has exactly one winner, and all may add the very same plants.
        """
        url = self.url(store) if kind is FORK.Process else None
        if kind is FORK.Process and not url:
            pytest.skip('the plants of this store die with it')
        ids = {name: random.Random(name).sample(range(200), 120) for name in 'abcdefgh'}
        same = [Plant(id, 'Fern') for id in range(200, 220)]
        together, results = FORK.Barrier(len(ids)), FORK.SimpleQueue()

        def add_all(name):
            with open_store(url) if url else nullcontext(store) as shared:
                together.wait(PATIENCE)
                for plant in same:
                    shared.add(plant)
                for id in ids[name]:
                    with suppress(IdTaken):
                        shared.add(Plant(id, name))
                        results.put((id, name))

        at_once(kind, *(partial(add_all, name) for name in ids))
        results.put(None)
        won = [Plant(*result) for result in iter(results.get, None)]
        assert sorted(plant.id for plant in won) == sorted(set().union(*ids.values()))
        self.assert_holds(store, *won, *same)
        assert not any(map(store.add, [*won, *same]))

    def test_iterate_while_adding(self, store):
        """5. Iteration yields every plant that was added before it began, each once."""
        before = [Plant(id, 'Fern') for id in range(50)]
        assert all(map(store.add, before))
        begun = [itertools.chain([next(it)], it) for it in (iter(store), iter(store))]
        for id in range(50, 100):
            store.add(Plant(id, 'Moss'))
        for plants in map(list, begun):
            assert len(plants) == len(set(plants))
            assert set(plants) >= set(before)

    @pytest.mark.parametrize('used', [True, False], ids=['used', 'fresh'])
    def test_closed_store_refuses(self, store, used):
        """7. After ``close`` every new use of the plants raises ``StoreClosed``.

        A block closes its store, even after an exception; ``close`` may be repeated.
        """
        if used:
            store.add(FERN)
        with pytest.raises(ZeroDivisionError), store as entered:
            raise ZeroDivisionError
        assert entered is store
        for use in 2 * uses(store):
            with pytest.raises(StoreClosed):
                use()
            store.close()

    @pytest.mark.parametrize(('used', 'loads'), [(0, 0), (1, 0), (1, 1), (1, 2)])
    def test_store_works_after_a_fork(self, store, used, loads):
        """8. A store that was made before a fork works after it, in both processes.

        After ``load``, which may be called again, nothing is open.
        """
        files, stored = open_files(), [FERN] * used
        store.add_many(iter(stored))
        if (url := self.url(store)) and loads:
            store.close()
            store = open_store(url, create=False)
        for _ in range(loads):
            store.load()
        opened = open_files() - files
        assert not (loads and opened)

        def use():
            # What the parent process has opened is of no use in this one.
            with open(os.devnull, 'r+b') as nothing:
                for file in opened:
                    os.dup2(nothing.fileno(), int(file.name))
            goes_on(store, MOSS, *stored)

        at_once(FORK.Process, use)
        stored += [MOSS] * bool(url)
        goes_on(store, Plant(3, 'Ivy'), *stored)
        self.assert_holds(store, Plant(3, 'Ivy'), *stored)
        store.close()

    def test_missing_store_is_made_only_with_create(self, store, tmp_path):
        """A store that was opened with ``create=False`` is not made by any use."""
        url = self.url(store) or pytest.skip('this store is never missing')
        for file in tmp_path.iterdir():  # some stores are made by their constructor
            file.unlink()
        with open_store(url, create=False) as missing:
            for use in uses(missing):
                with pytest.raises(StoreUnavailable):
                    use()
                assert not [*tmp_path.iterdir()], use
        for create, is_new in (True, True), (False, False):
            with open_store(url, create=create) as made:
                assert made.add(FERN) is is_new

    def test_plant_that_is_none_is_refused(self, store):
        """9. ``add`` and ``add_many`` raise ``ValueError``, and nothing is stored."""
        store.add(FERN)
        sentence = f'^({"|".join(Plant._fields)}): '
        for plant in NO_PLANTS:
            with pytest.raises(ValueError, match=sentence):
                store.add(plant)
            with pytest.raises(ValueError, match=sentence):
                store.add_many([MOSS, plant])
        self.assert_holds(store, FERN)

    @pytest.mark.parametrize('use', ['add', 'add_many', 'ping', 'close'])
    def test_caller_may_be_interrupted(self, store, use, current=threading.get_ident):
        """10. The plant of an interrupted caller is stored or not; others go on.

        It is interrupted at one point after another, until it ends before.
        """
        if not (url := self.url(store)) and use == 'close':
            pytest.skip('the plants of this store die with it')
        store.add(FERN)
        files, ended, given, others = open_files(), False, [], [FERN]
        while not ended:
            given.append(Plant(-len(others), 'Fern'))
            others.append(Plant(len(others) + 1, 'Moss'))
            plants = {'add': given[-1:], 'add_many': [given[-1:]]}.get(use, [])
            used = open_store(url, scheduler=self.scheduler) if url else store
            if url and use != 'add':  # which opens it
                used.ping()
            call = partial(getattr(used, use), *plants)
            ended = ends_before(len(given), call, current)
            assert store.add(others[-1])  # one that hangs raises after 5 s
            if url:
                with suppress(*[StoreClosed] * (use == 'close')):
                    assert used.add(FERN) is False
                used.close()
        assert not url or open_files() <= files
        added = [*others, *given[-1:] * bool(plants)]
        stored = list(store)
        assert {*added} <= {*stored} <= {*others, *given}
        self.assert_holds(store, *set(stored))
