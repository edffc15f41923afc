"""URLs of stores: showing them without secrets, and stores of installed packages.

A package offers a store through an entry point, which names a function or a class with
the parameters of ``open_store``. ``docs/stores.md`` says what it must do, with an
example. ``store.testing`` has the tests that such a store must pass.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from store.base import Create, PlantStore
from store.scheduler import Scheduler

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEFAULT_URL = 'jsonl:plants.jsonl'
BUILT_IN = ('memory', 'jsonl', 'postgresql', 'postgres')

# jsonl: is left out where its path may have the same characters.
SECRETS = [
    re.compile(pattern, re.DOTALL | re.IGNORECASE)
    for pattern in (
        r'(^(?!jsonl:)\w*:/*|//).*\?.*@.*',
        r'(^(?!jsonl:)\w*:/*|//).*(?=@)',
        r'(^(?!jsonl:).*\?).*',
        r'(//[^/@]*:)(?![0-9]+\b)[^/]*',  # a password, where the host was left out
        r'(password=).*',
    )
]


def masked(url: str) -> str:
    """Return the URL of a store as a log may show it, with ``***`` for its secrets.

    All that may be a secret is hidden, since faulty URLs are shown, too: a password may
    have a character that should be percent-encoded, or the scheme may be missing.
    """
    for secret in SECRETS:
        url = secret.sub(r'\1***', url)
    return url


def open_plugin(url: str, *, create: Create, scheduler: Scheduler) -> PlantStore:
    """Return the store of an installed package.

    Raises:
        ValueError: No package has it, or it does not work; the message says which.
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
    """Return the entry point for a URL, and the beginning of messages about it.

    Raises:
        ValueError: There is none, or it does not load; the message says which.
    """
    # NOTE: imported here, because it takes half of the time of a command that needs
    # no package.
    from importlib.metadata import entry_points

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
    except Exception as ex:  # importing a package may raise anything
        reason = f'{type(ex).__name__}: {ex}'
        raise ValueError(f'{where}: {found[0].value} does not load: {reason}') from ex
    return found[0], where
