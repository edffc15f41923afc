"""URLs of stores: how one is shown, and which installed package has its store.

A package offers one through an entry point, here for URLs ``trees:...``::

    [project.entry-points.'plant_store.stores']
    trees = 'plants_in_trees:open_trees'

It names a function, or a class, with the parameters of ``open_store``: it is called as
``open_trees(url, create=..., scheduler=...)`` and returns a ``PlantStore``. For a URL
that is wrong it raises ``ValueError`` with a sentence that does not repeat the URL.
What blocks for long should run in ``scheduler.call(function)``, so that a worker of the
server answers other requests meanwhile. ``store.testing`` has the tests that such a
store must pass.
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points

from store.base import Create
from store.base import PlantStore
from store.scheduler import Scheduler

DEFAULT_URL = 'jsonl:plants.jsonl'
BUILT_IN = ('memory', 'jsonl', 'postgresql', 'postgres')

# The path of a file may have any of these characters.
SECRETS = [
    re.compile(pattern, re.DOTALL | re.IGNORECASE)
    for pattern in (
        r'(^(?!jsonl:)\w*:/*|//).*\?.*@.*',
        r'(^(?!jsonl:)\w*:/*|//).*(?=@)',
        r'(^(?!jsonl:).*\?).*',
        r'(//[^/@]*:)(?![0-9]+\b)[^/]*',  # a port that is none: the host was left out
        r'(password=).*',
    )
]


def masked(url: str) -> str:
    """Return the URL of a store as a log may show it, with ``***`` for its secrets.

    What might be one counts, since a URL with a fault in it is shown, too: a password
    with a character that should have been percent-encoded, a scheme that was left out.
    """
    for secret in SECRETS:
        url = secret.sub(r'\1***', url)
    return url


def open_plugin(url: str, *, create: Create, scheduler: Scheduler) -> PlantStore:
    """Return the store of an installed package.

    Raises:
        ValueError: There is none, or it does not work; the message says which.
    """
    plugin, where = find_plugin(url)
    try:
        store = plugin.load()(url, create=create, scheduler=scheduler)
    except (TypeError, ValueError) as ex:
        raise ValueError(f'{where}: {ex}') from ex
    if not isinstance(store, PlantStore):
        kind = type(store).__name__
        raise ValueError(f'{where}: {plugin.value} returned a {kind}, not a PlantStore')
    return store


def find_plugin(url: str) -> tuple[EntryPoint, str]:
    """Return what an installed package offers for a URL, and how messages call it.

    Raises:
        ValueError: None does, or it does not load; the message says which.
    """
    scheme, colon, _ = url.partition(':')
    installed = [
        plugin
        for plugin in entry_points(group='plant_store.stores')
        if plugin.name not in BUILT_IN
    ]
    found = [plugin for plugin in installed if colon and plugin.name == scheme]
    if not found:
        names = ', '.join(f'{plugin.name}:' for plugin in installed)
        raise ValueError(
            f'{masked(url)!r} is not a store: use memory:, jsonl:PATH, or '
            f'postgresql://...; installed packages offer {names or "no other"}'
        )
    packages = [
        f'package {p.dist.name if p.dist else "of unknown name"}' for p in found
    ]
    where = f'{masked(url)!r}: {" and ".join(sorted(packages))}'
    if len(found) > 1:
        raise ValueError(f'{where} offer this scheme: remove one')
    try:
        found[0].load()
    except Exception as ex:  # whatever importing the package raises
        reason = f'{type(ex).__name__}: {ex}'
        raise ValueError(f'{where}: {found[0].value} does not load: {reason}') from ex
    return found[0], where
