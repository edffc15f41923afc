"""Start a server, look at it, end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PATIENCE = 30  # seconds; longer than anything takes that works


class Failed(Exception):
    """A contender did not do what it is measured for; the message says what."""


class Server(NamedTuple):
    """A server that runs, in a process group of its own.

    Attributes:
        port: Where it listens.
        process: Its first one, with the pid of the group.
        began: When it was started, by ``time.perf_counter``.
    """

    port: int
    process: subprocess.Popen[bytes]
    began: float


@contextmanager
def serving(
    command: Sequence[str], environ: Mapping[str, str], directory: Path
) -> Iterator[Server]:
    """Run a server until the end of the block; nothing of it is left then.

    Args:
        command: What to run; ``{NAME}`` stands for a variable that is added.
        environ: Variables to add; ``PORT`` is added to them.
        directory: Where to run it.

    Raises:
        Failed: The block failed; the end of the server's log is added.
    """
    port = free_port()
    added = {**environ, 'PORT': f'{port}'}
    # In memory, so that a log is no load for the disk.
    log = os.memfd_create('log')
    began = time.perf_counter()
    process = subprocess.Popen(
        [part.format_map(added) for part in command],
        cwd=directory,
        env={**os.environ, **added},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield Server(port, process, began)
    except Failed as ex:
        text = os.pread(log, 1_000_000, 0).decode('utf-8', 'replace')
        raise Failed('\n    '.join([str(ex), *text.splitlines()[-10:]])) from ex
    finally:
        end(process, signal.SIGTERM)
        os.close(log)


def end(process: subprocess.Popen[bytes], number: int) -> None:
    """End a process with a signal, and by force what is left of its group."""
    process.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port: int = free.getsockname()[1]
        return port


def memory(group: int) -> float:
    """Return the proportional set size of a process group, in MiB.

    A page that several processes share is counted once, a part for each.
    """
    total = 0
    for stat in Path('/proc').glob('[0-9]*/stat'):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(')')[2].split()[2]) == group:
                rows = (stat.parent / 'smaps_rollup').read_text().splitlines()
                total += sum(int(r.split()[1]) for r in rows if r.startswith('Pss:'))
    return total / 1024
