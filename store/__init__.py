"""Stores of plants: one contract, ``PlantStore``, and the stores that keep it."""

from __future__ import annotations

from store.base import Create, Plant, PlantStore, check_plant
from store.errors import (
    IdTaken,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
)
from store.scheduler import THREADS, Scheduler
from store.url import DEFAULT_URL, find_plugin, masked, open_plugin

__version__ = '1.2.0'

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
    'check_url',
    'masked',
    'open_store',
]

POSTGRESQL = ('postgresql', 'postgres')


def open_store(
    url: str, *, create: Create = 'first', scheduler: Scheduler = THREADS
) -> PlantStore:
    """Return the store that a URL names; the store opens when it is first used.

    Args:
        url: ``memory:``, ``jsonl:PATH``, ``postgresql://...``, or a URL whose scheme an
            installed package offers: see ``store/url.py``.
        create: Whether a missing store is made: ``always``, ``never``, or ``first``,
            which means only if nothing shows that it existed before. A new store
            knows no earlier id.
        scheduler: How the callers of the store wait.

    Raises:
        ValueError: The URL names no store; the message says what is accepted.
    """
    check_url(url)
    scheme, _, rest = url.partition(':')
    # NOTE: imported here, so that no store needs the packages of another.
    if scheme == 'memory':
        from store.memory import MemoryStore

        return MemoryStore()
    if scheme == 'jsonl':
        from store.jsonl import JSONLinesStore

        return JSONLinesStore(rest, create=create, scheduler=scheduler)
    if scheme in POSTGRESQL:
        from store.postgresql import PostgreSQLStore

        return PostgreSQLStore(url, create=create, scheduler=scheduler)
    return open_plugin(url, create=create, scheduler=scheduler)


def check_url(url: str) -> None:
    """Check that a URL names a store; nothing is opened or made.

    Raises:
        ValueError: It names none; the message says what is accepted.
    """
    scheme, _, rest = url.partition(':')
    if url == 'memory:' or (scheme == 'jsonl' and rest):
        return
    if scheme not in POSTGRESQL or not rest.startswith('//'):
        find_plugin(url)
        return
    try:
        from store import postgresql

        postgresql.check_url(url)
    except ImportError as ex:
        reason = f'it needs the package psycopg[binary] ({ex})'
        raise ValueError(f'{masked(url)!r}: {reason}') from ex
    except ValueError as ex:
        raise ValueError(f'{masked(url)!r}: {ex}') from ex
