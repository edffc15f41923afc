"""The tests that every store of plants must pass, for the authors of stores.

To test a store of your own, write a subclass of ``StoreContract``: see
``docs/example_store/test_plants_in_sqlite.py``. Its fixture ``store`` makes an empty
store that was not used yet. ``raw_plants`` reads the stored plants without the code
that is tested; the store may be closed, or not used yet.

``url`` is for a store whose plants outlive the object: the tests open such a store
again by ``open_store``, in this process and in others. So its package must be
installed, with the entry point that names its scheme (see ``store/url.py``). Override
``unavailable`` if a test can keep the store from working for a moment.

Each test quotes the promise of ``PlantStore`` that it checks. pytest and hypothesis are
needed here, and nowhere else in this package. For readable failures put
``pytest.register_assert_rewrite('store.testing')`` into ``conftest.py``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from store import IdTaken, Plant, PlantStore, StoreClosed, StoreUnavailable, open_store

PATIENCE = 60  # seconds after which a test takes something for hanging
FORK = multiprocessing.get_context('fork')

# The text of a plant: Unicode without U+0000 and lone surrogates.
TEXTS = st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\0'))

IDS = [
    *(sign * number for number in (1, 9, 10, 255, 10**18) for sign in (1, -1)),
    *(2**bits + near for bits in (31, 32, 53) for near in (-1, 0, 1)),
    *(-(2**bits) + near for bits in (31, 32, 53) for near in (-1, 0, 1)),
    *(0, 2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1),
]

HOSTILE = {
    'empty': '',
    'blank': ' \t ',
    'controls': ''.join(map(chr, range(1, 0x20))),
    'more-controls': ''.join(map(chr, range(0x7F, 0xA0))),
    'line-ends': 'a\nb\rc\r\nd\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\n',
    'quotes': '"\\"/\'`\\\\',
    'escapes': '\\u0000 \\ud800 \\n \\N \\. \\x00 %00 &#0;',
    'record': '{"id":1,"name":"x"}\n{"id":2,"name":"y"}\n',
    'sql': "'); DROP TABLE plants; --",
    'placeholders': '%s %(name)s {} {0} $1 :name ?',
    'null': 'null',
    'array': '{"a,b",NULL}',
    'NULL': 'NULL',
    'byte-order-mark': '\ufeffFern',
    'noncharacters': '\ufdd0\ufffe\uffff\U0001fffe\U0010ffff',
    'right-to-left': '\u202eFern\u202c \u0641',
    'joined': '\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301',
    'padded': '  Fern  ',
}

PLANTS = [
    *(Plant(id, 'Fern', 'shade') for id in IDS),
    *(Plant(7000 + at, text) for at, text in enumerate(HOSTILE.values())),
    *(Plant(8000 + at, 'Fern', text) for at, text in enumerate(HOSTILE.values())),
]

# Names and tags of two plants that are not the same plant.
RIVALS = [
    (('Fern', None), ('fern', None)),
    (('Fern', None), ('Fern', 'shade')),
    (('Fern', 'shade'), ('Fern', None)),
    (('Fern', 'shade'), ('Fern', 'sun')),
    (('Fern', None), ('Fern', '')),
    (('Fern', ''), ('Fern', None)),
    (('Fern', None), ('Fern', 'null')),
    (('', 'Fern'), ('Fern', '')),
    (('Fern', None), ('Fern ', None)),
    (('Fern', None), ('Fern\n', None)),
    (('\u00e9', None), ('e\u0301', None)),
    (('\u212b', None), ('\u00c5', None)),
    (('x' * 5000, None), ('x' * 5001, None)),
]

_new: Any = Plant  # with arguments of wrong types
NO_PLANTS: list[Plant] = [
    *(_new(id, 'Fern') for id in (True, 1.0, '1', None, 2**63, -(2**63) - 1)),
    *(_new(2, name) for name in (None, b'Fern', 5, 'Fe\0rn', 'Fern\udc80')),
    *(_new(2, 'Fern', tag) for tag in (5, False, b'', 'sha\0de', '\ud800shade')),
]


def plane(number: int) -> str:
    """Return every character of a plane of Unicode that a plant may hold."""
    points = range(max(1, number << 16), (number + 1) << 16)
    return ''.join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def in_threads(*jobs: Callable[[], object]) -> None:
    """Run functions at once, each in a thread; fail if one fails or hangs."""
    failures: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as ex:
            failures.append(ex)

    # Daemons, so that a thread that hangs fails its test and not the whole run.
    threads = [threading.Thread(target=run, args=[job], daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    hung = sum(thread.is_alive() for thread in threads)
    assert not hung, f'{hung} of {len(threads)} threads hang'
    if failures:
        raise failures[0]


def wait_until(condition: Callable[[], object]) -> None:
    """Return when a condition holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, 'it never came true'
        time.sleep(0.001)


def in_child(*jobs: Callable[[], object]) -> None:
    """Run functions at once, each in a forked child; fail if one fails or hangs."""

    def run(job: Callable[[], object]) -> None:
        job()
        os._exit(0)  # without waiting for the threads that a store has left

    children = [FORK.Process(target=run, args=[job]) for job in jobs]
    for child in children:
        child.start()
    deadline = time.monotonic() + PATIENCE
    for child in children:
        child.join(max(0, deadline - time.monotonic()))
    exit_codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
        child.join()
    assert exit_codes == [0] * len(jobs)


MODEL = settings(max_examples=10, stateful_step_count=25, deadline=None)


class Model(RuleBasedStateMachine):
    """A store and a dict that are given the same plants must behave alike.

    One store serves all examples, so each example has ids of its own.
    """

    # Set by the test, and shared by the examples.
    contract: ClassVar[StoreContract]
    store: ClassVar[PlantStore]
    plants: ClassVar[dict[int, Plant]]
    examples: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        Model.examples += 1
        self.base = 16 * Model.examples

    @rule(number=st.integers(0, 7), name=TEXTS, tag=st.none() | TEXTS)
    def add(self, number: int, name: str, tag: str | None) -> None:
        self.offer(Plant(self.base + number, name, tag))

    @rule(number=st.integers(0, 7))
    def repeat(self, number: int) -> None:
        if plant := self.plants.get(self.base + number):
            self.offer(plant)

    def offer(self, plant: Plant) -> None:
        if self.plants.setdefault(plant.id, plant) == plant:
            self.store.add(plant)
        else:
            with pytest.raises(IdTaken):
                self.store.add(plant)

    @rule()
    def look(self) -> None:
        assert sorted(self.store) == sorted(self.plants.values())

    @rule()
    def open_again(self) -> None:
        if self.contract.url(self.store):
            self.store.close()
            Model.store = self.contract.reopen(self.store)

    @invariant()
    def ready(self) -> None:
        self.store.ping()


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
class StoreContract:
    """The tests of one store class; see the top of this module for the subclass."""

    def raw_plants(self, store: Any) -> list[Plant]:
        """Return the stored plants, read without the code of the store."""
        raise NotImplementedError

    def url(self, store: Any) -> str | None:
        """Return the URL of the store, or ``None`` if its plants die with it."""
        return None

    def unavailable(self, store: Any) -> AbstractContextManager[object] | None:
        """Return a context in which every add fails, or ``None`` if there is none."""
        return None

    def reopen(self, store: PlantStore) -> PlantStore:
        """Return another store of the same plants, which was not used yet."""
        url = self.url(store)
        if url is None:
            pytest.skip('the plants of this store die with the object')
        return open_store(url)

    def assert_holds(self, store: PlantStore, *plants: Plant) -> None:
        """Check which plants are stored, with the code of the store and without it."""
        assert sorted(self.raw_plants(store)) == sorted(plants)
        assert sorted(store) == sorted(plants)

    # ---- promise 1: what ``add`` acknowledges

    def test_any_plant_is_stored(self, store: PlantStore) -> None:
        """When ``add`` returns, the plant is durable: any id, name and tag."""
        for plant in PLANTS:
            store.add(plant)
        self.assert_holds(store, *PLANTS)

    def test_every_character_is_stored(self, store: PlantStore) -> None:
        """When ``add`` returns, the plant is durable: with every Unicode character."""
        plants = [Plant(number, plane(number)) for number in range(17)]
        for plant in plants:
            store.add(plant)
        self.assert_holds(store, *plants)

    def test_huge_text_is_stored(self, store: PlantStore) -> None:
        """When ``add`` returns, the plant is durable: with a name of a megabyte."""
        texts = enumerate(['x', '"', '\x01', '\U0001f331'])
        plants = [Plant(id, text * 2**20, text) for id, text in texts]
        for plant in [*plants, Plant(9, 'Fern'), *plants]:
            store.add(plant)
        self.assert_holds(store, *plants, Plant(9, 'Fern'))

    def test_plants_outlive_the_store(self, store: PlantStore) -> None:
        """When ``add`` returns, the plant is durable: it outlives the store object."""
        for plant in PLANTS:
            store.add(plant)
        store.close()
        with self.reopen(store) as again:
            self.assert_holds(again, *PLANTS)
            assert not any(again.add(plant) for plant in PLANTS)
            with pytest.raises(IdTaken):
                again.add(PLANTS[0]._replace(name='Moss'))
            self.assert_holds(again, *PLANTS)

    def test_repeat_is_stored_once(self, store: PlantStore) -> None:
        """When the very same plant was there before, ``add`` returns ``False``."""
        plants = [Plant(1, 'Fern'), Plant(2, 'Fern', ''), Plant(3, '', 'shade')]
        assert [store.add(plant) for plant in plants * 3] == [True] * 3 + [False] * 6
        self.assert_holds(store, *plants)

    def test_add_many_is_like_add(self, store: PlantStore) -> None:
        """``add_many`` does for each plant what ``add`` would do for it in its turn."""
        store.add(Plant(1, 'Fern'))
        store.add(Plant(2, 'Fern'))
        new = [Plant(id, 'Moss', 'shade') for id in IDS if id not in (1, 2)]
        taken, present = Plant(1, 'Moss'), Plant(2, 'Fern')
        plants = [*new, taken, present, new[0], new[1]._replace(tag=None), taken]
        outcomes = store.add_many(plants)
        assert outcomes[: len(new)] == [True] * len(new)
        first, *others = outcomes[len(new) :]
        assert others[:2] == [False, False]
        refused = [ex.id for ex in (first, *others[2:]) if isinstance(ex, IdTaken)]
        assert refused == [1, new[1].id, 1]
        assert store.add_many([]) == []
        self.assert_holds(store, Plant(1, 'Fern'), Plant(2, 'Fern'), *new)

    # ---- promise 2: ``IdTaken``

    def test_taken_id_is_refused(self, store: PlantStore) -> None:
        """When ``add`` raises ``IdTaken``, the store is unchanged."""
        stored = [Plant(id, *texts) for id, (texts, _) in enumerate(RIVALS)]
        for plant, (_, texts) in zip(stored, RIVALS, strict=True):
            assert store.add(plant)
            for _ in range(2):
                with pytest.raises(IdTaken) as caught:
                    store.add(Plant(plant.id, *texts))
                assert caught.value.id == plant.id
        self.assert_holds(store, *stored)
        assert not any(store.add(plant) for plant in stored)

    # ---- promise 3: ``StoreUnavailable``

    def test_unavailable_store_recovers(self, store: PlantStore) -> None:
        """When ``add`` raises ``StoreUnavailable``: repeat the call."""
        trouble = self.unavailable(store)
        if trouble is None:
            pytest.skip('nothing can make this store unavailable')
        store.add(Plant(1, 'Fern'))
        with trouble:
            for attempt in (store.ping, lambda: store.add(Plant(2, 'Moss'))):
                with pytest.raises(StoreUnavailable):
                    attempt()
        store.ping()
        store.add(Plant(2, 'Moss'))
        self.assert_holds(store, Plant(1, 'Fern'), Plant(2, 'Moss'))

    # ---- promise 4: threads and processes

    def test_threads_share_a_store(self, store: PlantStore) -> None:
        """``add`` may be called from many threads: each id has exactly one winner."""
        won: defaultdict[int, list[str]] = defaultdict(list)
        ids = {name: random.Random(name).sample(range(200), 100) for name in 'abcdefgh'}

        def add_all(name: str) -> None:
            for id in ids[name]:
                with contextlib.suppress(IdTaken):
                    store.add(Plant(id, name))
                    won[id].append(name)

        in_threads(*(lambda name=name: add_all(name) for name in ids))
        assert set(won) == set().union(*ids.values())
        assert all(len(names) == 1 for names in won.values())
        self.assert_holds(store, *(Plant(id, *names) for id, names in won.items()))

    def test_threads_may_repeat(self, store: PlantStore) -> None:
        """``add`` may be called from many threads: also with the very same plants."""
        plants = [Plant(id, 'Fern') for id in range(20)]
        in_threads(*[lambda: [store.add(plant) for plant in plants]] * 8)
        self.assert_holds(store, *plants)

    def test_processes_share_a_store(self, store: PlantStore) -> None:
        """``add`` may be called from many processes: each id has one winner."""
        if self.url(store) is None:
            pytest.skip('the plants of this store live in one process')
        ids = {name: random.Random(name).sample(range(200), 120) for name in 'abcd'}
        together, results = FORK.Barrier(len(ids)), FORK.SimpleQueue()

        def add_all(name: str) -> None:
            with self.reopen(store) as other:
                together.wait(PATIENCE)
                for id in ids[name]:
                    with contextlib.suppress(IdTaken):
                        other.add(Plant(id, name))
                        results.put((id, name))

        in_child(*(lambda name=name: add_all(name) for name in ids))
        won = []
        while not results.empty():
            won.append(Plant(*results.get()))
        assert sorted(plant.id for plant in won) == sorted(set().union(*ids.values()))
        self.assert_holds(store, *won)
        for plant in won:
            store.add(plant)
        self.assert_holds(store, *won)

    # ---- promise 5: iteration

    def test_iterate_while_adding(self, store: PlantStore) -> None:
        """Iteration yields every plant that was added before it began, each once."""
        before = [Plant(id, 'Fern') for id in range(50)]
        for plant in before:
            store.add(plant)
        iterator = iter(store)
        seen = [next(iterator)]
        for id in range(50, 100):
            store.add(Plant(id, 'Moss'))
        seen += iterator
        assert len(seen) == len(set(seen))
        assert set(seen) >= set(before)

    def test_iterate_twice_at_once(self, store: PlantStore) -> None:
        """Iteration yields every plant, however many iterations there are."""
        plants = [Plant(id, 'Fern') for id in range(5)]
        for plant in plants:
            store.add(plant)
        pairs = list(zip(iter(store), iter(store), strict=True))
        assert sorted(pairs) == [(plant, plant) for plant in plants]

    # ---- promise 6: ``ping``

    def test_ping_adds_nothing(self, store: PlantStore) -> None:
        """``ping`` returns if an ``add`` would work now, and adds nothing."""
        self.assert_holds(store)
        for _ in range(3):
            store.ping()
        self.assert_holds(store)

    def test_check_opening_adds_nothing(self, store: PlantStore) -> None:
        """``check_opening`` returns if the store would open, also if it is missing."""
        if url := self.url(store):
            with open_store(url, create='never') as missing:
                missing.check_opening()
        store.check_opening()
        store.add(Plant(1, 'Fern'))
        store.check_opening()
        self.assert_holds(store, Plant(1, 'Fern'))

    # ---- promise 7: ``close``

    @pytest.mark.parametrize('used', [True, False], ids=['used', 'fresh'])
    def test_closed_store_refuses(self, store: PlantStore, used: bool) -> None:
        """After ``close`` every use of the plants raises ``StoreClosed``."""
        fern = Plant(1, 'Fern')
        if used:
            store.add(fern)
        store.close()
        store.close()
        uses: list[Callable[[], object]] = [
            *(store.ping, store.check_opening, store.__iter__),
            *(lambda: store.add(fern), lambda: store.add_many([fern])),
        ]
        for use in uses * 2:
            with pytest.raises(StoreClosed):
                use()
        store.close()

    def test_block_closes_the_store(self, store: PlantStore) -> None:
        """A store closes itself at the end of its block, whatever happens there."""
        with contextlib.suppress(ZeroDivisionError), store as entered:
            assert entered is store
            store.add(Plant(1, 'Fern'))
            raise ZeroDivisionError
        with pytest.raises(StoreClosed):
            store.ping()

    def test_close_ends_concurrent_adds(self, store: PlantStore) -> None:
        """After ``close`` an ``add`` raises ``StoreClosed``; none hangs."""
        added: list[Plant] = []

        def add_until_closed(name: str) -> None:
            with contextlib.suppress(StoreClosed):
                for number in range(10**6):
                    plant = Plant(number, name)
                    with contextlib.suppress(IdTaken):
                        store.add(plant)
                        added.append(plant)

        def close() -> None:
            wait_until(lambda: len(added) > 50)
            store.close()

        in_threads(
            close, *(lambda name=name: add_until_closed(name) for name in 'abcd')
        )
        assert set(added) <= set(self.raw_plants(store))

    # ---- promise 8: forks

    def test_store_works_after_a_fork(self, store: PlantStore) -> None:
        """A store that was made before a fork works after it, in both processes."""
        before, by_child, by_parent = (Plant(id, 'Fern') for id in range(3))
        store.add(before)

        def use() -> None:
            store.ping()
            store.add(before)
            with pytest.raises(IdTaken):
                store.add(Plant(before.id, 'Moss'))
            store.add(by_child)
            assert set(store) == {before, by_child}
            store.close()

        in_child(use)
        store.add(by_parent)
        shared = [by_child] if self.url(store) else []
        self.assert_holds(store, before, by_parent, *shared)

    def test_unused_store_works_after_a_fork(self, store: PlantStore) -> None:
        """A store that was made before a fork works after it, also if it was unused."""
        with self.reopen(store) as fresh:
            in_child(lambda: fresh.add(Plant(1, 'Fern')))
            with pytest.raises(IdTaken):
                fresh.add(Plant(1, 'Moss'))
            self.assert_holds(store, Plant(1, 'Fern'))

    # ---- promise 9: what is no plant

    def test_plant_that_is_none_is_refused(self, store: PlantStore) -> None:
        """``add`` and ``add_many`` raise ``ValueError``, before anything is stored."""
        fern = Plant(1, 'Fern')
        store.add(fern)
        for plant in NO_PLANTS:
            with pytest.raises(ValueError, match=r'^(id|name|tag): '):
                store.add(plant)
            with pytest.raises(ValueError, match=r'^(id|name|tag): '):
                store.add_many([Plant(2, 'Moss'), plant])
        self.assert_holds(store, fern)

    def test_store_behaves_as_a_dict(self, store: PlantStore) -> None:
        """After any sequence of calls a store holds the plants that a dict would."""
        Model.contract, Model.store, Model.plants = self, store, {}
        try:
            run_state_machine_as_test(Model, settings=MODEL)
            self.assert_holds(Model.store, *Model.plants.values())
        finally:
            Model.store.close()
