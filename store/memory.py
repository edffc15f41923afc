"""A store in the memory of one process, for tests and quick trials."""

from collections.abc import Iterator

from store.base import Plant, PlantStore, check_plant
from store.errors import IdTaken, StoreClosed


class MemoryStore(PlantStore):
    """Keep plants in a dictionary; durable until the process ends."""

    def __init__(self, url: str = 'memory:', **options: object) -> None:
        if url != 'memory:':
            raise ValueError('nothing may follow memory:')
        self._plants: dict[int, Plant] = {}
        self._closed = False

    def add(self, plant: Plant) -> bool:
        check_plant(plant)
        self.ping()
        new = Plant(*plant)  # an object of its own, to tell it from the stored one
        stored = self._plants.setdefault(plant.id, new)  # atomic
        if stored != new:
            raise IdTaken.between(stored, new)
        return stored is new

    def __iter__(self) -> Iterator[Plant]:
        self.ping()
        return iter(list(self._plants.values()))

    def ping(self) -> None:
        if self._closed:
            raise StoreClosed

    def close(self) -> None:
        self._closed = True
