"""Measure this service and what people would use instead: ``python -m bench``.

Every contender is measured in turn, round after round, so that a noisy machine is noisy
for all of them; what counts is the median, and the ratio between two of one run. wrk
takes its share of the same cores, whoever is measured.

A fast wrong server does not count. Before each round a contender must refuse what is
not a new plant, a request without a token, and a different plant with a taken id; and
after it the plants in its database must be those that it has acknowledged. One that
promises durability must have synced at least once for as many plants as could be under
way at once.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench import report
from bench.contenders import CONTENDERS
from bench.contenders import HERE
from bench.contenders import TOP
from bench.load import check_manners
from bench.load import first_answer
from bench.load import load
from bench.serving import Failed
from bench.serving import memory
from bench.serving import serving

CONNECTIONS = (16, 64)
DELAYS_MS = (0, 2)
WARM_UP = 1  # seconds
WARM_IDS, HOT_IDS = 1_000, 500_000_000  # far from each other


class Case(NamedTuple):
    """A contender under a load, on a disk.

    Attributes:
        name: Of the contender.
        delay_ms: How much longer each of its syncs takes, in milliseconds.
        connections: How many clients there are, each on a kept connection.
    """

    name: str
    delay_ms: int
    connections: int


def main() -> None:
    """Measure, print, and keep the figures of a whole run."""
    parser = argparse.ArgumentParser(prog='python -m bench', description=__doc__)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--seconds', type=int, default=3, help='of each measurement')
    parser.add_argument('--only', nargs='+', metavar='NAME', choices=CONTENDERS)
    options = parser.parse_args()
    if not shutil.which('wrk'):
        sys.exit('Error: install wrk (apt-get install wrk)')
    with tempfile.TemporaryDirectory(dir=TOP, prefix='.bench-') as name:
        directory = Path(name)
        directory.chmod(0o711)  # PostgreSQL runs as another user
        shim = build_shim(directory)
        figures = {
            'rounds': options.rounds,
            'seconds': options.seconds,
            'machine': machine(directory),
            **measure_all(options, directory, shim),
        }
    if not options.only:
        report.save(figures)
    print(report.text(figures))
    for case, reason in figures['failed']:
        print(f'FAILED, and left out: {case}: {reason}', file=sys.stderr)
    sys.exit(bool(figures['failed']))


def measure_all(options: argparse.Namespace, directory: Path, shim: Path) -> report.Run:
    """Measure every case, round after round."""
    cases = [
        Case(name, delay_ms, connections)
        for name in options.only or CONTENDERS
        for delay_ms in (DELAYS_MS if CONTENDERS[name].syncs else DELAYS_MS[:1])
        for connections in CONNECTIONS
    ]
    loads: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    failed: dict[Case, str] = {}
    for number in range(options.rounds):
        for case in cases:
            if case in failed:
                continue
            try:
                seen = measure(case, directory, shim, options.seconds)
            except (Failed, OSError, subprocess.SubprocessError) as ex:
                failed[case] = str(ex)
                print(f'{describe(case)}: FAILED', file=sys.stderr)
                continue
            loads[case].append(seen)
            print(
                f'{number + 1}/{options.rounds} {describe(case)}: {seen["rate"]:.0f}/s',
                file=sys.stderr,
            )
    return {
        'loads': [
            {**case._asdict(), 'rounds': seen}
            for case, seen in loads.items()
            if case not in failed
        ],
        'failed': [[describe(case), reason] for case, reason in failed.items()],
    }


def measure(case: Case, directory: Path, shim: Path, seconds: int) -> dict[str, float]:
    """Run one round of one case, from the start of the server to its end."""
    contender = CONTENDERS[case.name]
    syncs = directory / 'syncs'
    syncs.write_bytes(bytes(8))
    syncs.chmod(0o666)
    preload = {
        'LD_PRELOAD': f'{shim}',
        'SYNC_COUNT': f'{syncs}',
        'SYNC_DELAY': f'{1000 * case.delay_ms}',
    }
    seen = {}
    with (
        tempfile.TemporaryDirectory(dir=directory) as own,
        contender.database(Path(own), preload) as database,
    ):
        environ = {
            'DATABASE': database.url,
            'PLANTS_STORE': database.url,
            'TOKEN': contender.token,
            'PLANTS_TOKENS': contender.token,
            **contender.environ,
            **database.environ,
        }
        with serving(contender.command, environ, contender.directory) as server:
            first = first_answer(server, contender)
            if not contender.bare:
                check_manners(server, contender)
            if case[1:] == (DELAYS_MS[0], CONNECTIONS[0]):
                time.sleep(1)  # until all workers are there and idle
                seen['first_answer_s'] = first
                seen['memory_mib'] = memory(server.process.pid)
            warm = load(server, contender, case.connections, WARM_UP, first_id=WARM_IDS)
            synced = count_syncs(syncs)
            hot = load(server, contender, case.connections, seconds, first_id=HOT_IDS)
            synced = count_syncs(syncs) - synced
        acknowledged = 1 + warm.answers + hot.answers
        if contender.bare or database.stored is None:
            stored = acknowledged
        else:
            stored = database.stored()
    # What was under way when wrk stopped, twice, may be stored without its answer.
    if not acknowledged <= stored <= acknowledged + 2 * case.connections:
        raise Failed(f'{acknowledged} plants acknowledged, {stored} stored')
    if contender.syncs and synced * case.connections < hot.answers:
        raise Failed(f'{hot.answers} plants acknowledged with {synced} syncs')
    seen |= {'rate': hot.rate, 'p50_ms': hot.p50_ms, 'p99_ms': hot.p99_ms}
    return {**seen, 'syncs': synced / hot.answers}


def build_shim(directory: Path) -> Path:
    """Compile the library that counts syncs and slows them down."""
    shim = directory / 'slow_sync.so'
    source = HERE / 'slow_sync.c'
    command = ['cc', '-shared', '-fPIC', '-O2', '-o', f'{shim}', f'{source}', '-ldl']
    subprocess.run(command, check=True)
    return shim


def count_syncs(path: Path) -> int:
    """Return how many syncs the shim has counted."""
    return int.from_bytes(path.read_bytes(), sys.byteorder)


def machine(directory: Path) -> dict[str, str | float]:
    """Say what the figures were measured on."""
    took = []
    with (directory / 'disk').open('wb', buffering=0) as file:
        for _ in range(200):
            began = time.perf_counter()
            file.write(bytes(64))
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return {
        'cores': len(os.sched_getaffinity(0)),
        'python': platform.python_version(),
        'sync_ms': 1000 * statistics.median(took),
    }


def describe(case: Case) -> str:
    """Name a case for a person."""
    disk = f'syncs {case.delay_ms} ms slower' if case.delay_ms else 'this disk'
    return f'{case.name}, {case.connections} connections, {disk}'


if __name__ == '__main__':
    main()
