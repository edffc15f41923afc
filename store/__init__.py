"""Stores of plants: one contract, ``PlantStore``, and the stores that keep it."""

from store.base import Plant as Plant
from store.base import PlantStore as PlantStore
from store.base import check_plant as check_plant
from store.errors import IdTaken as IdTaken
from store.errors import StoreClosed as StoreClosed
from store.errors import StoreCorrupt as StoreCorrupt
from store.errors import StoreError as StoreError
from store.errors import StoreUnavailable as StoreUnavailable
from store.masking import masked as masked
from store.scheduler import THREADS as THREADS
from store.scheduler import Scheduler as Scheduler
from store.url import DEFAULT_URL as DEFAULT_URL
from store.url import open_store as open_store

__version__ = '2.1.0'
