"""Descriptors that no forked child may keep.

A child shares the open files of its parent. An ``flock`` that both share excludes
neither, and stays held when the parent is killed. So a child closes such descriptors at
once, whether or not it ever uses the store.
"""

import os

owned: dict[object, int] = {}  # an open descriptor by its owner


def _close_all() -> None:
    while owned:
        os.close(owned.popitem()[1])


os.register_at_fork(after_in_child=_close_all)


def close(owner: object) -> None:
    """Close the descriptor of an owner, if it has one that is open."""
    if owner in owned:
        os.close(owned.pop(owner))
