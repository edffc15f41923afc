"""The standard streams of a command: plants that it reads, and what it prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

from store.base import Plant
from store.errors import StoreUnavailable
from store.jsonl import record

INPUT = 'the standard input'


class OutputError(Exception):
    """The standard output cannot be written; the message is the reason."""


class OutputClosed(OutputError):
    """The reader of the standard output has closed it, as ``head`` does."""


def write(data: bytes = b'', *, flush: bool = True) -> None:
    """Write to the standard output.

    Raises:
        OutputError: What is written from now on is lost. No other error is one of the
            output: a store may raise ``BrokenPipeError``, too.
    """
    try:
        if data:
            sys.stdout.buffer.write(data)
        if flush:
            sys.stdout.flush()
    except OSError as ex:
        # The interpreter would flush the output again at its exit, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        kind = OutputClosed if isinstance(ex, BrokenPipeError) else OutputError
        raise kind(ex.strerror) from ex


def print_line(line: str) -> None:
    """Print a line, if anybody still reads the output: a copy goes on without."""
    with suppress(OutputClosed):
        # Paths may hold bytes that are not UTF-8.
        write(f'{line}\n'.encode(errors='surrogateescape'))


def read_plants() -> Iterator[Plant]:
    """Yield the plants of the standard input.

    Raises:
        StoreUnavailable: It cannot be read, or a line is no plant.
    """
    try:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                # The last line feed may be missing: a line that was cut off anywhere
                # else is no JSON object.
                yield record.decode(line.removesuffix(b'\n') + b'\n')
            except record.DamagedRecord as ex:
                reason = f'line {number} is no plant: {ex}'
                raise StoreUnavailable(reason, store=INPUT) from ex
    except OSError as ex:
        raise StoreUnavailable.refused(ex, INPUT) from ex


# Not covered: tests run it in processes of their own.
def replace_closed_streams() -> None:  # pragma: no cover
    """Open a null device for each standard stream that is closed.

    Otherwise a plant file might get its number, and the errors of libraries. The
    devices for input and output are opened the wrong way round, so that their use fails
    (EBADF). Only error messages are lost silently.
    """
    for fd, name, mode, flags in (
        (0, 'stdin', 'r', os.O_WRONLY),
        (1, 'stdout', 'w', os.O_RDONLY),
        (2, 'stderr', 'w', os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, flags), fd)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))
