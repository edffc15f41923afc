"""Stores of plants: one contract, ``PlantStore``, and the stores that keep it."""

from __future__ import annotations

from importlib.metadata import entry_points

from store.base import Create
from store.base import Plant
from store.base import PlantStore
from store.errors import IdTaken
from store.errors import StoreClosed
from store.errors import StoreCorrupt
from store.errors import StoreError
from store.errors import StoreUnavailable
from store.scheduler import THREADS
from store.scheduler import Scheduler
from store.url import masked

__all__ = [
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
    'check_url',
    'masked',
    'open_store',
]


POSTGRESQL = ('postgresql', 'postgres')
BUILT_IN = ('memory', 'jsonl', *POSTGRESQL)
PLUGINS = 'plant_store.stores'  # the group of entry points


def open_store(
    url: str, *, create: Create = 'first', scheduler: Scheduler = THREADS
) -> PlantStore:
    """Return the store that a URL names; it opens when it is first used.

    Args:
        url: ``memory:``, ``jsonl:PATH``, ``postgresql://...``, or a URL whose scheme is
            an entry point of an installed package, in the group ``plant_store.stores``.
            The entry point is called with the arguments of this function.
        create: Whether a store that is missing is made: ``always``, ``never``, or
            ``first``, only if nothing shows that it was there before. A new store
            forgets every id.
        scheduler: How the callers of the store wait.

    Raises:
        ValueError: No store has such a URL; the message says what is accepted.
    """
    check_url(url)
    scheme, _, rest = url.partition(':')
    # NOTE: imported here, so that no store needs what only another one imports.
    if scheme == 'memory':
        from store.memory import MemoryStore

        return MemoryStore()
    if scheme == 'jsonl':
        from store.jsonl import JSONLinesStore

        return JSONLinesStore(rest, create=create, scheduler=scheduler)
    if scheme in POSTGRESQL:
        from store.postgresql import PostgreSQLStore

        return PostgreSQLStore(url, create=create, scheduler=scheduler)
    (plugin,) = entry_points(group=PLUGINS, name=scheme)
    store: PlantStore = plugin.load()(url, create=create, scheduler=scheduler)
    return store


def check_url(url: str) -> None:
    """Check that a store has such a URL; nothing is opened or made.

    Raises:
        ValueError: No store has; the message says what is accepted.
    """
    scheme, _, rest = url.partition(':')
    if url == 'memory:' or (scheme == 'jsonl' and rest):
        return
    if scheme in POSTGRESQL and rest.startswith('//'):
        from store import postgresql

        try:
            postgresql.check_url(url)
        except ValueError as ex:
            raise ValueError(f'{masked(url)!r}: {ex}') from ex
        return
    if scheme in BUILT_IN or len(entry_points(group=PLUGINS, name=scheme)) != 1:
        raise ValueError(
            f'{masked(url)!r} is not a store: '
            f'use memory:, jsonl:PATH, or postgresql://...'
        )
