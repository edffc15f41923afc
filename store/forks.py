"""Descriptors of a store: no forked child keeps one, and none is a standard stream.

A child shares the open files of its parent. An ``flock`` that both share excludes
neither, and stays held when the parent is killed. So a child closes such descriptors at
once, whether or not it ever uses the store.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from weakref import WeakSet

generation = 0  # forks between the first process and this one: no two of them have one
_began = _ended = 0  # forks of this process, of several threads
_owned: WeakSet[FileIO] = WeakSet()


def opened(open_one: Callable[[], int]) -> FileIO:
    """Return the file of a descriptor, which each child closes at once.

    A child that was forked before it was noted may have it: then another one is opened.
    """
    while True:
        ended = _ended
        file = FileIO(open_one(), 'r')
        _owned.add(file)
        if _began == ended:
            return file
        file.close()
        time.sleep(0.001)


def fill_standard() -> None:
    """Open the null device where a standard stream is closed.

    The next file would be one, and get the messages of C libraries. REQUIRES: called
    before each opening of a file or socket of a store.
    """
    for number in range(3):
        try:
            os.get_inheritable(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number


def _begin() -> None:
    global _began
    _began += 1


def _end() -> None:
    global _began, _ended
    _ended += 1
    _began = max(_began, _ended)  # an interrupt, or C that forks, skips a beginning


def _in_child() -> None:
    global generation, _began
    generation += 1
    _began = _ended
    for file in list(_owned):
        with suppress(OSError):
            file.close()


os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_in_child)
