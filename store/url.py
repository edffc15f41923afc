"""Opens the store that a URL names, even that of a package: see ``docs/stores.md``."""

import re
from importlib.metadata import EntryPoint, entry_points

from store.base import PlantStore
from store.errors import StoreError
from store.masking import clean, is_path
from store.scheduler import THREADS, Scheduler

DEFAULT_URL = 'jsonl:plants.jsonl'
GROUP = 'plant_store.stores'  # of the entry points of packages
OURS = [  # of the same kind
    EntryPoint('memory', 'store.memory:MemoryStore', GROUP),
    EntryPoint('jsonl', 'store.jsonl:JSONLinesStore', GROUP),
    EntryPoint('postgresql', 'store.postgresql:PostgreSQLStore', GROUP),
    EntryPoint('postgres', 'store.postgresql:PostgreSQLStore', GROUP),
]


def open_store(
    url: str, *, create: bool = True, scheduler: Scheduler = THREADS
) -> PlantStore:
    """Return the store that a URL names; the store opens when it is first used.

    ``create`` says whether a missing plant file or table is made: a new one knows no
    old id, so readers and workers of a server make none; ``scheduler`` how callers
    wait. Raises ``ValueError`` if the URL names no store, with what is accepted, and
    ``StoreUnavailable`` if a plant file is missing and cannot be made.
    """
    argument = url = url.strip()
    scheme, colon, path = url.partition(':')
    found = [it for it in OURS if it.name == scheme]
    found = found or [*entry_points(group=GROUP, name=scheme)]
    if not colon or len(found) != 1:
        offers = [f'{it.name}: ({it.value})' for it in entry_points(group=GROUP)]
        raise ValueError(
            'it is not a store: use memory:, jsonl:PATH, or postgresql://..., without '
            f'quotes, or what one package offers: {", ".join(offers) or "none does"}'
        )
    if scheme == 'jsonl':
        argument = path.strip()
        if not is_path(argument) or re.match('//|["\']|$', argument):
            raise ValueError('use jsonl:PATH without // or quotes, and ./ before ":"')
    try:
        make = found[0].load()
        store: PlantStore = make(argument, create=create, scheduler=scheduler)
    except StoreError:
        raise
    except Exception as ex:  # NOTE: "from None": it may hold a password
        reason = clean(str(ex), url)
        if found[0] in OURS and isinstance(ex, ImportError):  # or of its libpq
            reason = 'it needs the package psycopg[binary]'
        raise ValueError(f'{scheme}: {reason}') from None
    return store
