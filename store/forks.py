"""Descriptors that no forked child may keep.

A child shares the open files of its parent. An ``flock`` that both share excludes
neither, and stays held when the parent is killed; on a shared connection to a database
their messages mix, and the session outlives the parent. So a child closes such
descriptors at once, whether or not it ever uses the store.
"""

import os
from functools import partial


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self._close = partial(os.close, fd)

    def __del__(self) -> None:
        self._close()


# They close when they leave this dictionary, by their owners.
# NOTE: a hook is never removed. This one keeps nothing else in memory.
_owned: dict[object, _Descriptor] = {}
os.register_at_fork(after_in_child=_owned.clear)


def own(owner: object, fd: int) -> None:
    """Close a descriptor in each forked child, and when ``disown`` is called."""
    _owned[owner] = _Descriptor(fd)


def disown(owner: object) -> None:
    """Close the descriptor of an owner, if it has one that is open."""
    _owned.pop(owner, None)
