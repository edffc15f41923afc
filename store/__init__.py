"""Stores of plants: one contract, ``PlantStore``, and the stores that keep it."""

from __future__ import annotations

from store.base import Create
from store.base import Plant
from store.base import PlantStore
from store.errors import IdTaken
from store.errors import StoreClosed
from store.errors import StoreCorrupt
from store.errors import StoreError
from store.errors import StoreUnavailable
from store.url import DEFAULT_URL
from store.url import masked

__version__ = '1.1.0'

__all__ = [
    'DEFAULT_URL',
    'Create',
    'IdTaken',
    'Plant',
    'PlantStore',
    'StoreClosed',
    'StoreCorrupt',
    'StoreError',
    'StoreUnavailable',
    '__version__',
    'masked',
    'open_store',
]


def open_store(url: str, *, create: Create = 'first') -> PlantStore:
    """Return the store that a URL names; it opens when it is first used.

    Args:
        url: ``memory:``, ``jsonl:PATH``, or ``postgresql://...``.
        create: Whether a store that is missing is made: ``always``, ``never``, or
            ``first``, only if nothing shows that it was there before. A new store
            forgets every id.

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

        return JSONLinesStore(path, create=create)
    if scheme in ('postgresql', 'postgres') and path.startswith('//'):
        from store.postgresql import PostgreSQLStore

        try:
            return PostgreSQLStore(url, create=create)
        except ValueError as ex:
            raise ValueError(f'{masked(url)!r}: {ex}') from ex
    raise ValueError(
        f'{masked(url)!r} is not a store: use memory:, jsonl:PATH, or postgresql://...'
    )
