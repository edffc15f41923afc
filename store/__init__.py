"""Stores of plants: one contract, ``PlantStore``, and the stores that keep it."""

from __future__ import annotations

import re

from store.base import Plant
from store.base import PlantStore
from store.errors import IdTaken
from store.errors import StoreClosed
from store.errors import StoreCorrupt
from store.errors import StoreError
from store.errors import StoreUnavailable

__all__ = [
    'IdTaken',
    'Plant',
    'PlantStore',
    'StoreClosed',
    'StoreCorrupt',
    'StoreError',
    'StoreUnavailable',
    'open_store',
]


def open_store(url: str, *, start_anew: bool = False) -> PlantStore:
    """Return the store that a URL names; it opens when it is first used.

    Args:
        url: ``memory:`` or ``jsonl:PATH``.
        start_anew: Make a new file also where the index shows that one was there and
            is gone. Without it such a store is unavailable until the file is back,
            since a new file would forget every id.

    Raises:
        ValueError: No store has such a URL; the message says what is accepted.
    """
    scheme, _, path = url.partition(':')
    # NOTE: imported here, so that no store needs what only another one imports.
    if url == 'memory:':
        from store.memory import MemoryStore

        return MemoryStore()
    if scheme == 'jsonl' and path:
        from store.jsonl import JSONLinesStore

        return JSONLinesStore(path, start_anew=start_anew)
    shown = re.sub('//[^/]*@', '//...@', url)  # there may be a password
    raise ValueError(f'{shown!r} is not a store: use memory: or jsonl:PATH')
