"""The tests of the contract of ``PlantStore``: see ``store/testing``."""

import itertools
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from store.base import Plant, PlantStore
from store.errors import IdTaken, StoreClosed, StoreUnavailable
from store.scheduler import THREADS
from store.testing.plants import FERN, HOSTILE, IDS, MOSS, NO_PLANTS, SIMILAR, samples
from store.testing.waiting import FORK, PATIENCE, in_child, in_threads, wait_until
from store.url import open_store


def uses(store: PlantStore) -> list[Callable[[], object]]:
    """Return calls that need the plants of a store; a worker makes the first two."""
    add_many = partial(store.add_many, [MOSS])
    return [store.ping, partial(store.add, FERN), add_many, partial(list, store)]


def open_files() -> set[Path]:
    """Return the open files and sockets of this process; each name is a number."""
    return {file for file in Path('/dev/fd').iterdir() if file.exists()}


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
class StoreContract:
    """The tests of one store class; see ``store.testing`` for the subclass."""

    def raw_plants(self, store: Any) -> list[Plant]:
        """Return the plants of a store, open or not, read without its code."""
        raise NotImplementedError

    def url(self, store: Any) -> str | None:
        """Return the URL of the store, or ``None`` if its plants die with it."""
        return None

    def unavailable(self, store: Any) -> AbstractContextManager[object]:
        """Return a context in which every add fails."""
        pytest.skip('nothing can make this store unavailable')

    def shared_url(self, store: PlantStore) -> str:
        return self.url(store) or pytest.skip('the plants of this store die with it')

    def assert_holds(self, store: PlantStore, *plants: Plant) -> None:
        """Check which plants are stored, with the code of the store and without it."""
        assert sorted(self.raw_plants(store)) == sorted(plants)
        assert sorted(store) == sorted(plants)

    def test_store_behaves_as_a_dict(self, store: PlantStore) -> None:
        """When ``add`` returns, the plant is durable: any id, any text, a megabyte.

        It outlives the store object. When it is added again, ``add`` returns ``False``.
        When ``add`` raises ``IdTaken`` for a different plant, the store is unchanged.
        """
        chance, plants = random.Random(1), dict[int, Plant]()
        rivals = enumerate(itertools.permutations(SIMILAR, 2), 9000)
        given = [plant._replace(id=id) for id, pair in rivals for plant in pair]
        for name, tag in itertools.product(HOSTILE, [None, *HOSTILE]):
            given.append(Plant(chance.randrange(100), name, tag))
        given += [*samples(), *samples()]
        chance.shuffle(given)
        store.ping()
        store.check_opening()
        self.assert_holds(store)
        for plant in given:
            is_new = plant.id not in plants
            if plants.setdefault(plant.id, plant) == plant:
                assert store.add(plant) is is_new
            else:
                with pytest.raises(IdTaken) as caught:
                    store.add(plant)
                assert caught.value.id == plant.id
            if chance.random() < 0.01:
                store.ping()
                store.check_opening()
                assert sorted(store) == sorted(plants.values())
                if url := self.url(store):
                    store.close()
                    store = open_store(url)
        self.assert_holds(store, *plants.values())
        store.close()

    def test_add_many_is_like_add(self, store: PlantStore) -> None:
        """``add_many`` does for each plant what ``add`` would do, in the same order."""
        store.add(Plant(5, 'Fern'))
        new = [Plant(id, 'Moss', 'shade') for id in IDS]
        taken = [Plant(5, 'Moss'), new[1]._replace(tag=None)]
        outcomes = store.add_many([*new, *taken, Plant(5, 'Fern'), new[0], *taken])
        shown = [str(end) if isinstance(end, IdTaken) else end for end in outcomes]
        refused = [str(IdTaken(plant.id)) for plant in taken]
        assert shown == [True] * len(new) + refused + [False, False] + refused
        assert store.add_many([]) == []
        self.assert_holds(store, Plant(5, 'Fern'), *new)

    def test_unavailable_store_recovers(self, store: PlantStore) -> None:
        """When ``add`` raises ``StoreUnavailable``: repeat the call."""
        store.add(FERN)
        with self.unavailable(store):
            for attempt in store.ping, partial(store.add, MOSS):
                with pytest.raises(StoreUnavailable):
                    attempt()
        store.ping()
        store.add(MOSS)
        self.assert_holds(store, FERN, MOSS)

    @pytest.mark.parametrize('run', [in_threads, in_child])
    def test_adds_at_once(self, store: PlantStore, run: Callable[..., None]) -> None:
        """``add`` may be called from many threads, and from many processes.

        Each id has exactly one winner, and all may add the very same plants.
        """
        url = self.shared_url(store) if run is in_child else None
        ids = {name: random.Random(name).sample(range(200), 120) for name in 'abcdefgh'}
        same = [Plant(id, 'Fern') for id in range(200, 220)]
        together, results = FORK.Barrier(len(ids)), FORK.SimpleQueue()

        def add_all(name: str) -> None:
            with open_store(url) if url else nullcontext(store) as shared:
                together.wait(PATIENCE)
                for plant in same:
                    shared.add(plant)
                for id in ids[name]:
                    with suppress(IdTaken):
                        shared.add(Plant(id, name))
                        results.put((id, name))

        run(*(partial(add_all, name) for name in ids))
        results.put(None)
        won = [Plant(*result) for result in iter(results.get, None)]
        assert sorted(plant.id for plant in won) == sorted(set().union(*ids.values()))
        self.assert_holds(store, *won, *same)
        assert not any(map(store.add, [*won, *same]))

    def test_iterate_while_adding(self, store: PlantStore) -> None:
        """Iteration yields every plant that was added before it began, each once."""
        before = [Plant(id, 'Fern') for id in range(50)]
        assert all(map(store.add, before))
        begun = [(next(iterator), iterator) for iterator in (iter(store), iter(store))]
        for id in range(50, 100):
            store.add(Plant(id, 'Moss'))
        for first, others in begun:
            plants = [first, *others]
            assert len(plants) == len(set(plants))
            assert set(plants) >= set(before)

    def test_missing_store_is_made_by_its_first_use(
        self, store: PlantStore, tmp_path: Path
    ) -> None:
        """Constructor and ``check_opening`` make no store, nor does ``create='never'``.

        A store that is always there overrides this test.
        """
        url, files = self.shared_url(store), set(tmp_path.rglob('*'))
        with open_store(url, create='never') as missing:
            steps = {
                'the constructor': lambda: open_store(f'{url}2').close(),
                "check_opening with create='never'": missing.check_opening,
                'check_opening': store.check_opening,
            }
            for step, take in steps.items():
                take()
                fault = f"{step} must make no store, nor a use with create='never'"
                for use in uses(missing):
                    with suppress(StoreUnavailable):
                        use()
                        pytest.fail(f'{fault}: {use} does not raise StoreUnavailable')
                assert set(tmp_path.rglob('*')) == files, fault

    def test_wrong_url_is_not_repeated(self, store: PlantStore) -> None:
        """A ``ValueError`` for a URL does not repeat it: it may hold a password."""
        scheme = self.shared_url(store).partition(':')[0]
        for wrong in '//me:S3cret@host:port/x', '//S3cret@[x', '?password=S3cret':
            try:
                with suppress(StoreUnavailable):  # it may be a path
                    open_store(f'{scheme}:{wrong}').close()
            except ValueError as ex:
                # open_store() shows the class alone if the sentence repeats the URL.
                if 'S3cret' in str(ex) or str(ex).endswith('raised ValueError'):
                    pytest.fail(f'a ValueError must not repeat the URL: {ex}')

    def test_scheduler_calls_what_blocks(self, store: PlantStore) -> None:
        """``add`` and ``ping`` wait in ``scheduler.call``, or in a ``waiter`` of it."""
        scheduler = Mock(THREADS, wraps=THREADS)
        with open_store(self.shared_url(store), scheduler=scheduler) as other:
            other.add(MOSS)  # it opens the store
            for use in uses(other)[:2]:
                scheduler.reset_mock()
                use()
                waits = scheduler.call.called or scheduler.waiter.called
                assert waits, f'scheduler.call was not called by {use}'

    @pytest.mark.parametrize('used', [True, False], ids=['used', 'fresh'])
    def test_closed_store_refuses(self, store: PlantStore, used: bool) -> None:
        """After ``close`` every use raises ``StoreClosed``; a block closes its store.

        The block closes it even after an exception. ``close`` may be called again.
        """
        if used:
            store.add(FERN)
        with pytest.raises(ZeroDivisionError), store as entered:
            raise ZeroDivisionError
        assert entered is store
        for use in 2 * [*uses(store), store.check_opening]:
            with pytest.raises(StoreClosed):
                use()
            store.close()

    def test_close_ends_concurrent_adds(self, store: PlantStore) -> None:
        """After ``close`` an ``add`` raises ``StoreClosed``; none hangs."""
        added: list[Plant] = []

        def add_until_closed(first: int) -> None:
            with suppress(StoreClosed):
                for id in itertools.count(first, 4):
                    store.add(Plant(id, 'Fern'))
                    added.append(Plant(id, 'Fern'))

        def close() -> None:
            wait_until(lambda: len(added) > 50, '50 plants are added')
            store.close()

        in_threads(close, *(partial(add_until_closed, first) for first in range(4)))
        assert set(added) <= set(self.raw_plants(store))

    @pytest.mark.parametrize('used', [True, False], ids=['used', 'fresh'])
    def test_store_works_after_a_fork(self, store: PlantStore, used: bool) -> None:
        """A store that was made before a fork works after it, in both processes."""
        before, by_child, by_parent = (Plant(id, 'Fern') for id in range(3))
        files = open_files()
        if used:
            store.add(before)
        files = open_files() - files

        def use() -> None:
            # What the parent process has opened is of no use in this one.
            with open(os.devnull, 'r+b') as nothing:
                for file in files:
                    os.dup2(nothing.fileno(), int(file.name))
            store.ping()
            store.add(before)
            with pytest.raises(IdTaken):
                store.add(Plant(before.id, 'Moss'))
            store.add(by_child)
            assert set(store) == {before, by_child}
            store.close()

        in_child(use)
        shared = [by_child] if self.url(store) else []
        for plant in shared:
            with pytest.raises(IdTaken):
                store.add(plant._replace(name='Moss'))
        store.add(before)
        store.add(by_parent)
        self.assert_holds(store, before, by_parent, *shared)

    def test_plant_that_is_none_is_refused(self, store: PlantStore) -> None:
        """``add`` and ``add_many`` raise ``ValueError``, before anything is stored."""
        store.add(FERN)
        sentence = f'^({"|".join(Plant._fields)}): '
        for plant in NO_PLANTS:
            with pytest.raises(ValueError, match=sentence):
                store.add(plant)
            with pytest.raises(ValueError, match=sentence):
                store.add_many([MOSS, plant])
        self.assert_holds(store, FERN)
