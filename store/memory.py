"""A store in the memory of one process, for tests and quick trials."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from store.base import Plant, PlantStore, check_plant
from store.errors import IdTaken, StoreClosed


class MemoryStore(PlantStore):
    """Keep plants in a dictionary; durable until the process ends."""

    def __init__(self) -> None:
        self._plants: dict[int, Plant] = {}
        self._lock = threading.Lock()
        self._closed = False

    def add(self, plant: Plant) -> bool:
        check_plant(plant)
        with self._lock:
            self.ping()
            stored = self._plants.get(plant.id)
            if stored is None:
                self._plants[plant.id] = plant
            elif stored != plant:
                raise IdTaken(plant.id)
            return stored is None

    def __iter__(self) -> Iterator[Plant]:
        with self._lock:
            self.ping()
            return iter(list(self._plants.values()))

    def ping(self) -> None:
        if self._closed:
            raise StoreClosed

    def close(self) -> None:
        self._closed = True
