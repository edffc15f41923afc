"""Start a server, measure its memory and CPU time, stop it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PATIENCE = 30  # seconds; longer than any step of a healthy server


class Failed(Exception):
    """A server did not do what it should; the message says what."""


class Server(NamedTuple):
    """A running server, in its own process group.

    Attributes:
        port: Its TCP port.
        process: Its first process, whose pid is the id of the group.
        began: The time of its start, by ``time.perf_counter``.
    """

    port: int
    process: subprocess.Popen[bytes]
    began: float


@contextmanager
def serving(
    command: Sequence[str], environ: Mapping[str, str], directory: Path
) -> Iterator[Server]:
    """Run a server in the block, then end all of its processes.

    Args:
        command: The command line; ``{NAME}`` stands for an added variable.
        environ: The environment variables to add, besides ``PORT``.
        directory: The working directory.

    Raises:
        Failed: The block failed; the end of the server's log is added.
    """
    port = free_port()
    added = {**environ, 'PORT': f'{port}'}
    if sys.platform != 'linux':
        raise Failed('Linux is needed')
    # In memory, so that the log does not load the disk.
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
    """End a process with a signal, then kill the rest of its group."""
    process.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port: int = free.getsockname()[1]
        return port


def memory(group: int) -> float:
    """Return the proportional set size of a process group, in MiB.

    A page that several processes share is divided among them, so it counts once.
    """
    total = 0
    for directory in processes(group):
        with suppress(FileNotFoundError, ProcessLookupError):
            rows = (directory / 'smaps_rollup').read_text().splitlines()
            total += sum(int(r.split()[1]) for r in rows if r.startswith('Pss:'))
    return total / 1024


def cpu_time(group: int) -> float:
    """Return the CPU time that the processes of a group have used, in seconds."""
    ticks = 0
    for directory in processes(group):
        with suppress(FileNotFoundError, ProcessLookupError):
            ticks += sum(map(int, stat_fields(directory)[11:13]))
    return ticks / os.sysconf('SC_CLK_TCK')


def processes(group: int) -> Iterator[Path]:
    """Yield the directory in /proc of each process of a group."""
    for directory in Path('/proc').glob('[0-9]*'):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(stat_fields(directory)[2]) == group:
                yield directory


def stat_fields(directory: Path) -> list[str]:
    """Return the fields after the name in the ``stat`` file of a process: proc(5)."""
    return (directory / 'stat').read_text().rpartition(')')[2].split()
