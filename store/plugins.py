"""Stores that installed packages offer, found by the scheme of their URL.

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

from importlib.metadata import EntryPoint
from importlib.metadata import entry_points
from typing import Any

from store.base import Create
from store.base import PlantStore
from store.scheduler import Scheduler
from store.url import masked

GROUP = 'plant_store.stores'
BUILT_IN = ('memory', 'jsonl', 'postgresql', 'postgres')


def open_plugin(url: str, *, create: Create, scheduler: Scheduler) -> PlantStore:
    """Return the store of an installed package.

    Raises:
        ValueError: There is none, or it does not work; the message says which.
    """
    plugin = _find(url)
    function = _load(plugin, url)
    try:
        store = function(url, create=create, scheduler=scheduler)
    except (TypeError, ValueError) as ex:
        raise ValueError(f'{masked(url)!r}: {_package(plugin)}: {ex}') from ex
    if not isinstance(store, PlantStore):
        kind = type(store).__name__
        raise ValueError(
            f'{masked(url)!r}: {_package(plugin)}: {plugin.value} returned a {kind}, '
            f'not a PlantStore'
        )
    return store


def check_plugin(url: str) -> None:
    """Check that an installed package offers a store for a URL, and that it loads.

    Raises:
        ValueError: None does, or it does not load; the message says which.
    """
    _load(_find(url), url)


def _find(url: str) -> EntryPoint:
    scheme, colon, _ = url.partition(':')
    installed = [
        plugin for plugin in entry_points(group=GROUP) if plugin.name not in BUILT_IN
    ]
    found = [plugin for plugin in installed if colon and plugin.name == scheme]
    if len(found) == 1:
        return found[0]
    if found:
        packages = ' and '.join(sorted(map(_package, found)))
        raise ValueError(f'{masked(url)!r}: {packages} offer this scheme: remove one')
    names = ', '.join(f'{plugin.name}:' for plugin in installed)
    raise ValueError(
        f'{masked(url)!r} is not a store: use memory:, jsonl:PATH, or '
        f'postgresql://...; installed packages offer {names or "no other"}'
    )


def _load(plugin: EntryPoint, url: str) -> Any:
    try:
        return plugin.load()
    except Exception as ex:  # whatever importing the package raises
        raise ValueError(
            f'{masked(url)!r}: {_package(plugin)}: {plugin.value} does not load: '
            f'{type(ex).__name__}: {ex}'
        ) from ex


def _package(plugin: EntryPoint) -> str:
    return f'package {plugin.dist.name if plugin.dist else "of unknown name"}'
