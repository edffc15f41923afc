"""Descriptors that no forked child may keep.

A child shares the open files of its parent. An ``flock`` that both share excludes
neither, and stays held when the parent is killed; on a shared connection to a database
their messages mix, and the session outlives the parent. So a child closes such
descriptors at once, whether or not it ever uses the store.
"""

import os

_owned: dict[object, int] = {}


def _close_all() -> None:
    while _owned:
        os.close(_owned.popitem()[1])


os.register_at_fork(after_in_child=_close_all)


def own(owner: object, fd: int) -> None:
    """Close a descriptor in each forked child, and when ``disown`` is called."""
    _owned[owner] = fd


def disown(owner: object) -> None:
    """Close the descriptor of an owner, if it has one that is open."""
    if owner in _owned:
        os.close(_owned.pop(owner))
