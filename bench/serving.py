"""A server that is measured: start it, load it, check what it has stored, stop it."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
PATIENCE = 30  # seconds; longer than any step of a healthy server
TOKEN = 'bench'  # every contender accepts it
PLANT = '{"id": %d, "name": "Fern", "tag": "shade"}'
FIRST_PLANT = PLANT % 1
# What a fast but wrong server would answer otherwise: token, body, accepted statuses.
CHECKS = {
    'no token': (None, FIRST_PLANT, (401, 403)),
    'a wrong token': (f'{TOKEN}x', FIRST_PLANT, (401, 403)),
    'a name that is null': (TOKEN, FIRST_PLANT.replace('"Fern"', 'null'), (400, 422)),
    'a taken id': (TOKEN, FIRST_PLANT.replace('Fern', 'Rose'), (400, 409)),
    'the same plant again': (TOKEN, FIRST_PLANT, (200,)),
}

Environ = Mapping[str, str]


class Failed(Exception):
    """A server did not do what it should; the message says what."""


class Database(NamedTuple):
    """The database of a contender, empty at first."""

    url: str  # or path, as the contender gets it
    count_plants: Callable[[], int]


class Contender(NamedTuple):
    """A server to measure."""

    label: str  # in the tables; of contenders with one label the best is shown
    command: tuple[str, ...]  # {PORT} is filled in
    # Makes its database, in a directory, with environment variables.
    database: Callable[[Path, Environ], AbstractContextManager[Database]]
    directory: Path  # where it runs
    environ: tuple[tuple[str, str], ...] = ()  # variables to add


class Load(NamedTuple):
    """What a server did under a load."""

    adds: int  # all of them answered with 2xx
    rate: float  # adds a second
    p99_ms: float  # of the latency
    max_ms: float
    syncs: int
    cpu_s: float  # of all processes of the server


class Running:
    """A server that runs; its first process is the leader of a process group."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, syncs: Path
    ) -> None:
        self.port = port
        self._process, self._syncs = process, syncs
        began = time.perf_counter()
        while (status := self._post(FIRST_PLANT)) != 200:
            ended, took = process.poll() is not None, time.perf_counter() - began
            if ended or took > PATIENCE:
                raise Failed(f'not ready, or ended, after {took:.0f} s: {status}')
            time.sleep(0.002)
        self.first_answer_s = time.perf_counter() - began
        for what, (token, body, accepted) in CHECKS.items():
            if (status := self._post(body, token)) not in accepted:
                raise Failed(f'{what}: {status}')
        self.acknowledged, self.in_flight = 1, 0

    def _post(self, body: str, token: str | None = TOKEN) -> int | str:
        """Post a body on a new connection; return the status, or what went wrong."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, PATIENCE)
        headers = {'Authorization': f'Bearer {token}'} if token else {}
        try:
            headers |= {'Content-Type': 'application/json'}
            connection.request('POST', '/plants', body, headers)
            return connection.getresponse().status
        except OSError as ex:
            return str(ex)
        finally:
            connection.close()

    def load(self, connections: int, seconds: int) -> Load:
        """Add as many new plants as the server can take, on persistent connections."""
        # Each thread of wrk counts up from here.
        first_id = 1000 + 2 * (self.acknowledged + self.in_flight)
        command = [
            *('wrk', f'-t{min(2, connections)}', f'-c{connections}', f'-d{seconds}s'),
            *(f'--timeout={PATIENCE}s', '-s', f'{HERE}/post.lua'),
            *(
                f'http://127.0.0.1:{self.port}/plants',
                '--',
                TOKEN,
                f'{first_id}',
                PLANT,
            ),
        ]
        syncs, cpu_s = self._count_syncs(), self._cpu_s()
        done = subprocess.run(command, capture_output=True, text=True)
        syncs, cpu_s = self._count_syncs() - syncs, self._cpu_s() - cpu_s
        figures = done.stdout.rpartition('RESULT')[2].split()
        if done.returncode or len(figures) != 6:
            raise Failed(f'wrk: {done.stderr.strip()}')
        adds, took_us, refused, broken, p99_us, max_us = map(float, figures)
        if refused or broken or not adds:
            raise Failed(
                f'{adds} answers, {refused} not 2xx, {broken} requests without'
            )
        if syncs * connections < adds:
            raise Failed(f'{adds} plants acknowledged with {syncs} syncs')
        self.acknowledged += int(adds)
        self.in_flight += connections  # when wrk stops: stored unanswered, perhaps
        rate = adds / took_us * 1e6
        return Load(int(adds), rate, p99_us / 1e3, max_us / 1e3, syncs, cpu_s)

    def memory_mib(self) -> float:
        """Return the proportional set size of all processes.

        A page that several processes share is divided among them, so it counts once.
        """
        rows = ''.join(self._proc('smaps_rollup')).splitlines()
        return sum(int(r.split()[1]) for r in rows if r.startswith('Pss:')) / 1024

    def _cpu_s(self) -> float:
        stats = [text.rpartition(')')[2].split() for text in self._proc('stat')]
        ticks = sum(int(stat[11]) + int(stat[12]) for stat in stats)
        return ticks / os.sysconf('SC_CLK_TCK')

    def _proc(self, name: str) -> Iterator[str]:
        """Yield what a file in /proc has of each process of the group; see proc(5)."""
        for directory in Path('/proc').glob('[0-9]*'):
            with suppress(FileNotFoundError, ProcessLookupError):
                if os.getpgid(int(directory.name)) == self._process.pid:
                    yield (directory / name).read_text()

    def _count_syncs(self) -> int:
        return int.from_bytes(self._syncs.read_bytes(), sys.byteorder)


@contextmanager
def running(contender: Contender, disk: Environ) -> Iterator[Running]:
    """Run a contender with a new database; check at the end what it has stored.

    ``disk`` are variables for the library in ``slow_sync.c``.

    Raises:
        Failed: It has answered what it should not, or lost what it has acknowledged.
    """
    with TemporaryDirectory(dir=TOP, prefix='.bench-') as name:
        directory = Path(name)
        directory.chmod(0o711)  # PostgreSQL runs as another user
        shim, syncs = f'{name}/slow_sync.so', directory / 'syncs'
        compiler = ['cc', '-shared', '-fPIC', '-O2', '-o', shim]
        subprocess.run([*compiler, f'{HERE}/slow_sync.c', '-ldl'], check=True)
        syncs.write_bytes(bytes(8))
        syncs.chmod(0o666)
        preload = {'LD_PRELOAD': shim, 'SYNC_COUNT': f'{syncs}', **disk}
        with contender.database(directory, preload) as database:
            port = free_port()
            environ = {
                **preload,
                **dict.fromkeys(('DATABASE', 'PLANTS_STORE'), database.url),
                **dict.fromkeys(('TOKEN', 'PLANTS_TOKENS'), TOKEN),
                'PORT': f'{port}',
                **dict(contender.environ),
            }
            command = [part.format(PORT=port) for part in contender.command]
            with started(command, contender.directory, environ) as process:
                yield (run := Running(process, port, syncs))
            stored, least = database.count_plants(), run.acknowledged
            if not least <= stored <= least + run.in_flight:
                raise Failed(f'{least} plants acknowledged, {stored} stored')


@contextmanager
def started(
    command: Sequence[str],
    directory: Path | str,
    environ: Environ,
    *,
    user: str | None = None,
    stop: int = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in the block, in a process group that is ended after it.

    Raises:
        Failed: The block failed; the end of the program's log is added.
    """
    if sys.platform != 'linux':
        raise Failed('Linux is needed: memory and CPU time are read from /proc')
    log = os.memfd_create('log')  # in memory, so that it does not load the disk
    # The service warns of variables that begin with PLANTS_ and that it does not know.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith('PLANTS_')}
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**inherited, **environ},
        user=user,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    except Failed as ex:
        text = os.pread(log, 1_000_000, 0).decode('utf-8', 'replace')
        raise Failed('\n    '.join([str(ex), *text.splitlines()[-10:]])) from ex
    finally:
        process.send_signal(stop)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(log)


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port: int = free.getsockname()[1]
        return port
