"""Measure this service and its alternatives: ``python -m bench``.

The contenders are measured in turn, round after round, so that noise of the machine
affects all of them; every second round is in reverse order. Compare medians, and ratios
of two medians of one run. wrk runs on the same cores as the servers.

A fast but wrong server does not count. Before each round a contender must refuse an
invalid plant, a request without a token, and a different plant with a taken id. After
the round its database must hold as many plants as it has acknowledged, and it may have
acknowledged at most one plant per connection with each sync.
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

from bench.contenders import CONTENDERS
from bench.report import DISKS, Case, Run, replace, short_table, table
from bench.serving import TOP, Failed, running
from store.jsonl.disk import sync

WARM_UP = 1  # seconds


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog='bench', description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add('--rounds', type=int, default=5)
    add('--seconds', type=int, default=3, help='of each measurement')
    add('--only', nargs='+', choices=CONTENDERS, default=[*CONTENDERS], metavar='NAME')
    add('--pages', action='store_true', help='write the tables into the pages, too')
    options = parser.parse_args()
    if not shutil.which('wrk'):
        parser.error('wrk is missing: apt-get install wrk')
    run: Run = {}
    failed: dict[tuple[str, str], str] = {}
    pairs = [(name, disk) for disk in DISKS for name in options.only]
    for number in range(options.rounds):
        for name, disk in reversed(pairs) if number % 2 else pairs:
            if (name, disk) in failed:
                continue
            print(f'{number + 1}/{options.rounds} {name} {disk}', file=sys.stderr)
            try:
                measure(run, name, disk, options.seconds)
            except (Failed, OSError, subprocess.SubprocessError) as ex:
                failed[name, disk] = str(ex)
    for name, case in [*run]:
        if (name, case.disk) in failed:
            del run[name, case]
    page = f'{describe_conditions(options)}\n\n{table(run)}'
    print(page)
    if options.pages:
        replace('docs/benchmarks.md', page)
        replace('README.md', short_table(run))
    for (name, disk), reason in failed.items():
        print(f'FAILED, and left out: {name} {disk}: {reason}', file=sys.stderr)
    sys.exit(bool(failed))


def measure(run: Run, name: str, disk: str, seconds: int) -> None:
    """Run one round of a contender on a disk, from its start to its end."""
    variables, counts = DISKS[disk]
    with running(CONTENDERS[name], variables) as server:
        time.sleep(1)  # until all workers are started and idle
        idle_mib = server.memory_mib()
        for count in counts:
            server.load(count, WARM_UP)
            done = server.load(count, seconds)
            figures = {
                'rate': done.rate,
                'p99_ms': done.p99_ms,
                'cpu_us': 1e6 * done.cpu_s / done.adds,
                'adds_per_sync': done.adds / done.syncs,
                'first_answer_s': server.first_answer_s,
                'memory_mib': idle_mib,
            }
            run.setdefault((name, Case(count, disk)), []).append(figures)


def describe_conditions(options: argparse.Namespace) -> str:
    """Return a description of the machine and of the measurements."""
    return (
        f'{os.cpu_count()} cores, Python {platform.python_version()}; '
        f'a write and its sync take {sync_ms():.2f} ms. '
        'wrk and PostgreSQL run on the same cores. '
        '2 workers or processes, unless stated otherwise. Each request has a new '
        'traceparent and X-Request-Id. '
        'Plants added a second and, in brackets, the p99 in ms: '
        f'medians of {options.rounds} rounds of {options.seconds} s, to two digits. '
        'Memory is the PSS of all processes of the idle server, CPU the time of all '
        'its processes; both without PostgreSQL.'
    )


def sync_ms() -> float:
    """Return how long an append and its sync take: the median, in milliseconds."""
    took = []
    with tempfile.TemporaryFile(dir=TOP, buffering=0) as file:
        for _ in range(200):
            began = time.perf_counter()
            file.write(bytes(64))
            sync(file.fileno())
            took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took)


if __name__ == '__main__':
    main()
