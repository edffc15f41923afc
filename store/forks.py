"""Descriptors of a store: no forked child keeps one, and none is a standard stream.

A child shares the open files of its parent. An ``flock`` that both share excludes
neither, and stays held when the parent is killed. So a child closes such descriptors at
once, whether or not it ever uses the store.
"""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from weakref import WeakSet

generation = 0  # forks between the first process and this one: no two of them have one
_owned: WeakSet[FileIO] = WeakSet()
_going: list[None] = []  # forks that are going on: of several threads
_last = object()  # stands for the last one that has ended


def opened(open_one: Callable[[], int]) -> FileIO:
    """Return the file of a descriptor, opened so that each child closes it at once.

    A child that was forked between the opening and the entry would keep it. So then
    this process opens another one, before it takes any lock.
    """
    while True:
        last = _last
        file = FileIO(open_one(), 'r')
        _owned.add(file)
        if not _going and last is _last:
            return file
        file.close()
        time.sleep(0.001)


def fill_standard() -> None:
    """Open the null device where a standard stream is closed.

    The next file that is opened would be one, and have the messages of C libraries in
    it. REQUIRES: called before each opening of a file or socket of a store.
    """
    for number in range(3):
        try:
            fcntl.fcntl(number, fcntl.F_GETFD)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number


def _begin() -> None:
    _going.append(None)


def _end() -> None:
    global _last
    _last = object()
    del _going[-1:]  # there is none where C has forked


def _in_child() -> None:
    global generation
    generation += 1
    _going.clear()
    _end()
    for file in list(_owned):
        with suppress(OSError):
            file.close()


os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_in_child)
