"""The standard streams of a command: what it prints, and plants through a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from store.base import Plant, PlantStore
from store.errors import StoreUnavailable
from store.jsonl import record

PIPE = '-'  # the URL of a pipe on a command line
INPUT = 'the standard input'


class PipeStore(PlantStore):
    """Yield the plants of the standard input, or add plants to the standard output.

    One command reads from it or writes to it. It remembers no id.
    """

    def add(self, plant: Plant) -> bool:
        sys.stdout.buffer.write(record.encode(plant))
        return True

    def __iter__(self) -> Iterator[Plant]:
        try:
            for number, line in enumerate(sys.stdin.buffer, 1):
                try:
                    # The last line feed may be missing: a line that was cut off
                    # anywhere else is no JSON object.
                    yield record.decode(line.removesuffix(b'\n') + b'\n')
                except record.DamagedRecord as ex:
                    reason = f'line {number} is no plant: {ex}'
                    raise StoreUnavailable(reason, store=INPUT) from ex
        except OSError as ex:
            raise StoreUnavailable.refused(ex, INPUT) from ex

    def ping(self) -> None:
        sys.stdout.flush()

    def close(self) -> None:
        self.ping()


# Not covered: tests run it in processes of their own.
def replace_closed_streams() -> None:  # pragma: no cover
    """Open a null device for each standard stream that is closed.

    Otherwise the next file to be opened would get its number: libraries would write
    their error messages into a plant file. The devices for input and output are opened
    the wrong way round, so that their use fails (EBADF). Only error messages are lost
    silently.
    """
    for fd, name, mode, flags in (
        (0, 'stdin', 'r', os.O_WRONLY),
        (1, 'stdout', 'w', os.O_RDONLY),
        (2, 'stderr', 'w', os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, flags), fd)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line and flush it; to the standard output if no stream is given."""
    stream = stream or sys.stdout
    with broken_pipe_ignored():
        # Paths may hold bytes that are not UTF-8.
        stream.buffer.write(f'{line}\n'.encode(errors='surrogateescape'))
        stream.flush()


def print_error(sentence: str) -> None:
    """Print an error to the standard error."""
    print(f'Error: {sentence}', file=sys.stderr)


@contextmanager
def broken_pipe_ignored() -> Iterator[None]:
    """End the block without an error when the reader of the output has closed it."""
    try:
        yield
    except BrokenPipeError:  # pragma: no cover - tests of it run in other processes
        drop_output()


def drop_output() -> None:  # pragma: no cover
    """Keep the interpreter from flushing the output again, and failing, at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
