"""Measure this service and its alternatives: ``python -m bench``.

The contenders are measured in turn, round after round, so that noise of the machine
affects all of them; every second round is in reverse order. Compare medians, and ratios
of two medians of one run. wrk runs on the same cores as the servers.

A fast but wrong server does not count. Before each round a contender must refuse an
invalid plant, a request without a token, and a different plant with a taken id. After
the round its database must hold as many plants as it has acknowledged. A contender that
promises durability may acknowledge at most one plant per connection with each sync.
"""

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

from bench.contenders import CONTENDERS, HERE, TOP, Contender, add_options, chosen
from bench.load import TOKEN, check_answers, first_answer, load
from bench.report import CASES, DISKS, Case, Run, connections, markdown, write_pages
from bench.serving import Failed, cpu_time, memory, serving
from store.jsonl.disk import sync

WARM_UP = 1  # seconds
WARM_IDS, HOT_IDS = 1_000, 500_000_000  # the first ids; the ranges do not overlap


def main() -> None:
    """Measure, and print the table."""
    options = parse_options()
    with tempfile.TemporaryDirectory(dir=TOP, prefix='.bench-') as name:
        directory = Path(name)
        directory.chmod(0o711)  # PostgreSQL runs as another user
        run = Run(chosen(options), describe_conditions(options, directory))
        measure_all(run, options, directory)
    table = markdown(run)
    print(table)
    if options.pages:
        write_pages(run)
    for case, reason in run.failed.items():
        print(f'FAILED, and left out: {describe(case)}: {reason}', file=sys.stderr)
    sys.exit(bool(run.failed))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m bench',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=int, default=3, help='of each measurement')
    add_options(parser, default=list(CONTENDERS))
    parser.add_argument(
        '--pages', action='store_true', help='write the tables into the pages, too'
    )
    options = parser.parse_args()
    if not shutil.which('wrk'):
        parser.error('wrk is missing: apt-get install wrk')
    return options


def measure_all(run: Run, options: argparse.Namespace, directory: Path) -> None:
    """Measure every case, round after round."""
    shim = build_shim(directory)
    cases = [
        Case(name, *case)
        for case in CASES
        for name, contender in run.contenders.items()
        if contender.syncs or not case[1]
    ]
    for number in range(options.rounds):
        for case in reversed(cases) if number % 2 else cases:
            if case in run.failed:
                continue
            contender = run.contenders[case.name]
            try:
                figures = measure(case, contender, directory, shim, options.seconds)
            except (Failed, OSError, subprocess.SubprocessError) as ex:
                run.failed[case] = str(ex)
                print(f'{describe(case)}: FAILED', file=sys.stderr)
                continue
            run.figures.setdefault(case, []).append(figures)
            print(
                f'{number + 1}/{options.rounds} {describe(case)}: '
                f'{figures["rate"]:.0f}/s, p99 {figures["p99_ms"]:.1f} ms',
                file=sys.stderr,
            )


def measure(
    case: Case, contender: Contender, directory: Path, shim: Path, seconds: int
) -> dict[str, float]:
    """Run one round of one case, from the start of the server to its end."""
    sync_count = directory / 'syncs'
    sync_count.write_bytes(bytes(8))
    sync_count.chmod(0o666)
    preload = {
        'LD_PRELOAD': f'{shim}',
        'SYNC_COUNT': f'{sync_count}',
        **DISKS[case.disk],
    }
    figures = {}
    with (
        tempfile.TemporaryDirectory(dir=directory) as own,
        contender.database(Path(own), preload) as database,
    ):
        environ = {
            'DATABASE': database.url,
            'PLANTS_STORE': database.url,
            'TOKEN': TOKEN,
            'PLANTS_TOKENS': TOKEN,
            **contender.environ,
            **database.environ,
        }
        with serving(contender.command, environ, contender.directory) as server:
            first_answer_s = first_answer(server)
            check_answers(server)
            if case == Case(case.name):
                time.sleep(1)  # until all workers are started and idle
                figures['first_answer_s'] = first_answer_s
                figures['memory_mib'] = memory(server.process.pid)
            warm = load(server, case.connections, WARM_UP, WARM_IDS)
            synced = count_syncs(sync_count)
            cpu_s = cpu_time(server.process.pid)
            hot = load(server, case.connections, seconds, HOT_IDS)
            synced = count_syncs(sync_count) - synced
            cpu_s = cpu_time(server.process.pid) - cpu_s
        acknowledged = 1 + warm.answers + hot.answers
        stored = acknowledged
        if database.stored is not None:
            stored = database.stored()
    # wrk stops twice; each time, requests in flight may be stored unanswered.
    if not acknowledged <= stored <= acknowledged + 2 * case.connections:
        raise Failed(f'{acknowledged} plants acknowledged, {stored} stored')
    if not hot.answers:
        raise Failed('no answers')
    if contender.syncs and synced * case.connections < hot.answers:
        raise Failed(f'{hot.answers} plants acknowledged with {synced} syncs')
    return figures | {
        'rate': hot.rate,
        'p99_ms': hot.p99_ms,
        'cpu_us': 1e6 * cpu_s / hot.answers,
        **({'adds_per_sync': hot.answers / synced} if synced else {}),
    }


def build_shim(directory: Path) -> Path:
    """Compile the library that counts syncs and makes them slower."""
    shim = directory / 'slow_sync.so'
    source = HERE / 'slow_sync.c'
    command = ['cc', '-shared', '-fPIC', '-O2', '-o', f'{shim}', f'{source}', '-ldl']
    subprocess.run(command, check=True)
    return shim


def count_syncs(path: Path) -> int:
    """Return how many syncs the shim has counted."""
    return int.from_bytes(path.read_bytes(), sys.byteorder)


def describe_conditions(options: argparse.Namespace, directory: Path) -> str:
    """Return a description of the machine and of the measurements."""
    if sys.platform != 'linux':
        sys.exit('Linux is needed: memory and CPU time are read from /proc')
    cores = len(os.sched_getaffinity(0))
    return (
        f'{cores} cores, Python {platform.python_version()}; '
        f'a write and its sync take {sync_ms(directory):.2f} ms. '
        'wrk and PostgreSQL run on the same cores. '
        '2 workers or processes, unless stated otherwise. Each request has a new '
        'traceparent and X-Request-Id. '
        'Plants added a second and, in brackets, the p99 in ms: '
        f'medians of {options.rounds} rounds of {options.seconds} s. '
        'Memory is the PSS of all processes of the idle server, CPU the time of all '
        'its processes; both without PostgreSQL.'
    )


def sync_ms(directory: Path) -> float:
    """Return how long an append and its sync take: the median, in milliseconds."""
    took = []
    with (directory / 'disk').open('wb', buffering=0) as file:
        for _ in range(200):
            began = time.perf_counter()
            file.write(bytes(64))
            sync(file.fileno())
            took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took)


def describe(case: Case) -> str:
    """Return a case in words."""
    return ', '.join(filter(None, (case.name, connections(case), case.disk)))


if __name__ == '__main__':
    main()
