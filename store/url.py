"""Opens the store that a URL names, even that of a package: see ``docs/stores.md``."""

import os
import shlex

from store.base import PlantStore
from store.errors import StoreError
from store.masking import clean, is_path
from store.scheduler import THREADS, Scheduler

DEFAULT_URL = 'jsonl:plants.jsonl'


def open_store(
    url: str, *, create: bool = True, scheduler: Scheduler = THREADS
) -> PlantStore:
    """Return the store that a URL names; the store opens when it is first used.

    Args:
        url: ``memory:``, ``jsonl:PATH``, ``postgresql://...``, or a URL whose scheme an
            installed package offers; white space around URL and path is removed.
        create: Whether a missing plant file or table is made. A new store knows no old
            id, so readers and workers of a server make none.
        scheduler: How the callers of the store wait.

    Raises:
        ValueError: The URL names no store; the message says what is accepted.
        StoreUnavailable: A plant file is missing and cannot be made.
    """
    url, path = url.strip(), url.partition(':')[2]
    scheme, _, rest = url.partition(':')
    try:  # NOTE: imports are here, so that no store needs the packages of another.
        if url == 'memory:':
            from store.memory import MemoryStore

            return MemoryStore()
        if scheme == 'jsonl' and rest:
            from store.jsonl import JSONLinesStore

            return JSONLinesStore(_clean(path), create=create, scheduler=scheduler)
        if scheme in ('postgresql', 'postgres') and rest.startswith('//'):
            from store.postgresql import PostgreSQLStore

            return PostgreSQLStore(url, create=create, scheduler=scheduler)
    except (ImportError, ValueError) as ex:
        need = isinstance(ex, ImportError) * 'it needs the package psycopg[binary]: '
        reason = str(ex) if scheme == 'jsonl' else clean(str(ex), url)
        raise ValueError(f'{scheme}: {need}{reason}') from None
    return _open_plugin(url, create=create, scheduler=scheduler)


def _clean(text: str) -> str:
    """Return the path of a plant file without white space around it.

    Version 1 took white space and quotes for a part of the name. A new file with the
    right name would give the ids of such a file again, so that file is renamed first.
    """
    path = text.strip()
    plain = path.strip('"\'').strip()
    for name in filter(os.path.lexists, {text, path} - {plain}):
        new, old, free = map(_quoted, (plain, name, f'{plain}.renamed'))
        move = f'mv -n -- {old} {new}'
        if os.path.lexists(plain):
            move = f'mv -n -- {old} {free} && python -m store copy {free} {new}'
        raise ValueError(f'rename the file with white space or quotes: {move}')
    if path.startswith('//'):
        name = path.lstrip('/') if is_path(path) else 'PATH'
        raise ValueError(f'write jsonl:/{name} or jsonl:{name}, without "//"')
    if path != plain or not is_path(path):
        raise ValueError('put no quotes around a path, and ./ before one with a colon')
    return path


def _quoted(path: str) -> str:
    """Return an absolute path as a word that can be pasted into a shell."""
    path = os.path.abspath(path)
    # With a quote of one kind in it, repr() uses the other kind around it.
    escaped = '$' + repr(os.fsencode(path) + b'"')[1:-2] + "'"
    return shlex.quote(path) if path.isprintable() else escaped


def _open_plugin(url: str, **options: object) -> PlantStore:
    from importlib.metadata import entry_points

    stores = entry_points(group='plant_store.stores')
    found = [store for store in stores if url.startswith(f'{store.name}:')]
    if len(found) != 1:
        offers = [f'{it.name}: of {it.dist.name}' for it in stores if it.dist]
        raise ValueError(
            'it is not a store: use memory:, jsonl:PATH, or postgresql://..., without '
            f'quotes, or what one package offers ({", ".join(offers) or "none does"})'
        )
    try:
        store: PlantStore = found[0].load()(url, **options)
    except StoreError:
        raise
    except Exception as ex:  # NOTE: "from None": it may hold a password
        reason = f'{type(ex).__name__}: {clean(str(ex), url)}'
        raise ValueError(f'{found[0].name}: {found[0].value}: {reason}') from None
    return store
