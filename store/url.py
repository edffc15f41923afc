"""Opens the store that a URL names, even that of a package: see ``docs/stores.md``."""

from collections.abc import Callable

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
            installed package offers.
        create: Whether a missing plant file or table is made. A new store knows no old
            id, so readers and workers of a server make none.
        scheduler: How the callers of the store wait.

    Raises:
        ValueError: The URL names no store; the message says what is accepted.
        StoreUnavailable: A plant file is missing and cannot be made.
    """
    scheme, _, rest = url.partition(':')
    # NOTE: imported here, so that no store needs the packages of another.
    if url == 'memory:':
        from store.memory import MemoryStore

        return MemoryStore()
    if scheme == 'jsonl' and rest:
        if not is_path(rest):
            raise ValueError('jsonl: it is not a path; put ./ before one with a colon')
        from store.jsonl import JSONLinesStore

        return JSONLinesStore(rest, create=create, scheduler=scheduler)
    if scheme in ('postgresql', 'postgres') and rest.startswith('//'):  # both of libpq
        try:
            from store.postgresql import PostgreSQLStore

            return PostgreSQLStore(url, create=create, scheduler=scheduler)
        except ImportError as ex:
            need = f'{scheme}: it needs the package psycopg[binary] ({ex})'
            raise ValueError(need) from ex
        except ValueError as ex:
            raise ValueError(f'{scheme}: {ex}') from ex
    return _open_plugin(url, create, scheduler)


def _open_plugin(url: str, create: bool, scheduler: Scheduler) -> PlantStore:
    # NOTE: imported here: the import doubles the time of commands without plugins.
    from importlib.metadata import entry_points

    installed = entry_points(group='plant_store.stores')
    found = [plugin for plugin in installed if url.startswith(f'{plugin.name}:')]
    if not found:
        names = ', '.join(f'{plugin.name}:' for plugin in installed)
        raise ValueError(
            'it is not a store: use memory:, jsonl:PATH, or postgresql://...; '
            f'installed packages offer {names or "no other"}'
        )
    packages = sorted(f'package {plugin.dist.name}' for plugin in found if plugin.dist)
    where = f'{found[0].name}: {" and ".join(packages)}'
    if len(found) > 1:
        raise ValueError(f'{where} offer this scheme: remove one')
    try:
        make: Callable[..., PlantStore] = found[0].load()
        return make(url, create=create, scheduler=scheduler)
    except StoreError:
        raise
    except Exception as ex:
        # NOTE: "from None", and no text: both may hold a password. Only the text of a
        # ValueError or an ImportError is shown, unless it repeats a masked part.
        reason = clean(str(ex), url)
        if not isinstance(ex, (ValueError, ImportError)) or '***' in reason:
            reason = f'{found[0].value} raised {type(ex).__name__}'
        raise ValueError(f'{where}: {reason}') from None
