"""Stores of plants: one contract, ``PlantStore``, and the stores that keep it."""

from store.base import Create, Plant, PlantStore, check_plant
from store.errors import (
    IdTaken,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
)
from store.masking import masked
from store.scheduler import THREADS, Scheduler
from store.url import DEFAULT_URL, open_store

__version__ = '1.3.0'

__all__ = [
    'DEFAULT_URL',
    'THREADS',
    'Create',
    'IdTaken',
    'Plant',
    'PlantStore',
    'Scheduler',
    'StoreClosed',
    'StoreCorrupt',
    'StoreError',
    'StoreUnavailable',
    '__version__',
    'check_plant',
    'masked',
    'open_store',
]
