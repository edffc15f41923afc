"""Opens the store that a URL names, even that of a package: see ``docs/stores.md``."""

from importlib.metadata import EntryPoint, entry_points

from store.base import PlantStore
from store.errors import StoreError
from store.masking import clean, is_path
from store.scheduler import THREADS, Scheduler

DEFAULT_URL = 'jsonl:plants.jsonl'
GROUP = 'plant_store.stores'  # of the entry points of packages
# The stores of this package, offered in the same way.
OURS = [
    EntryPoint('memory', 'store.memory:MemoryStore', GROUP),
    EntryPoint('jsonl', 'store.jsonl:JSONLinesStore', GROUP),
    EntryPoint('postgresql', 'store.postgresql:PostgreSQLStore', GROUP),
    EntryPoint('postgres', 'store.postgresql:PostgreSQLStore', GROUP),
]
NEEDS_PSYCOPG = 'it needs the package psycopg[binary]'  # the only optional one


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
    scheme, colon, _ = url.partition(':')
    found = [it for it in OURS if it.name == scheme]
    found = found or [*entry_points(group=GROUP, name=scheme)]
    if not colon or len(found) != 1:
        offers = [f'{it.name}: ({it.value})' for it in entry_points(group=GROUP)]
        raise ValueError(
            'it is not a store: use memory:, jsonl:PATH, or postgresql://..., without '
            f'quotes, or what one package offers: {", ".join(offers) or "none does"}'
        )
    argument = _clean(path) if scheme == 'jsonl' else url
    try:
        make = found[0].load()
        store: PlantStore = make(argument, create=create, scheduler=scheduler)
    except StoreError:
        raise
    except Exception as ex:  # NOTE: "from None": it may hold a password
        is_missing = isinstance(ex, ImportError) and found[0] in OURS  # or its libpq
        reason = NEEDS_PSYCOPG if is_missing else clean(str(ex), url)
        raise ValueError(f'{scheme}: {reason}') from None
    return store


def _clean(text: str) -> str:
    """Return the path of a plant file without white space around it."""
    path = text.strip()
    is_plain = path.strip('"\'') == path and not path.startswith('//')
    if not (path and is_plain and is_path(path)):
        raise ValueError('write jsonl:PATH without "//" and quotes, with ./ before ":"')
    return path
