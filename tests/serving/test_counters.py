"""Metrics of a server with many processes: every worker tells what all have counted."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from server import GUNICORN
from server import REPOSITORY
from server import ROOMS
from server import SCRIPTS
from server import Server
from server import is_alive
from server import request
from server import wait_until


def upgrade(server):
    """Return the process id of the new master that SIGUSR2 starts beside the old."""
    children = Path(f'/proc/{server.pid}/task/{server.pid}/children')
    before = set(children.read_text().split())
    server.signal(signal.SIGUSR2)

    def new():
        found = set(children.read_text().split()) - before
        return found and int(found.pop())

    return wait_until(new, 'a new master starts')


# As a script, since what `python -m gunicorn` starts at SIGUSR2 finds modules of
# gunicorn in the place of Python's.
SCRIPT = (SCRIPTS / 'gunicorn', *GUNICORN[3:])


def counted(server, name='plants_request_seconds_count', **labels):
    """Return the sum of the samples that have a name and labels."""
    answer = server.ask(request('GET', '/metrics'))
    assert answer.status == 200
    return sum(
        sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def directory_of(pid):
    """Return the directory of the counters that a process has mapped."""
    found = re.search(
        r'(/\S*/plants-counters-[^/]+)/', Path(f'/proc/{pid}/maps').read_text()
    )
    return Path(found[1])


def add(server, first, number):
    """Add plants, each on a connection of its own, so that every worker has some."""
    for id in range(first, first + number):
        assert server.ask(request(body={'id': id, 'name': 'Fern'})).status == 200


def test_metrics_of_all_workers(tmp_path):
    """Every worker tells what all have counted, with the store's syncs."""
    with Server(tmp_path, workers=2, PLANTS_METRICS='1') as server:
        add(server, 1, 20)
        for _ in range(4):
            assert counted(server, route='/plants', status='200', error='0') == 20
        assert counted(server, 'plants_store_sync_seconds_count') == 20
        assert counted(server, 'plants_store_batch_plants_sum') == 20
        directory = directory_of(next(iter(server.worker_pids())))
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_metrics_outlive_workers(tmp_path):
    """A worker that was killed, and a reload, lose no count and leave no file."""
    with Server(tmp_path, workers=2, PLANTS_METRICS='1') as server:
        add(server, 1, 10)
        directory = directory_of(next(iter(server.worker_pids())))
        victim = max(server.worker_pids())
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(server.worker_pids() - {victim}) == 2, 'another starts')
        add(server, 11, 10)
        assert counted(server, route='/plants') == 20
        for _ in range(3):
            old = server.worker_pids()
            server.signal(signal.SIGHUP)
            wait_until(lambda old=old: not old & server.worker_pids(), 'all are new')
        add(server, 21, 10)
        assert counted(server, route='/plants') == 30
        assert len(list(directory.glob('*.db'))) <= 15
    assert not directory.exists()


def test_metrics_outlive_an_upgrade(tmp_path):
    """After SIGUSR2 both masters' workers tell everything, and the last one tidies."""
    with Server(tmp_path, command=SCRIPT, PLANTS_METRICS='1') as server:
        add(server, 1, 10)
        [worker] = server.worker_pids()
        directory = directory_of(worker)
        new = upgrade(server)
        try:
            wait_until(lambda: len(server.worker_pids()) == 2, 'a new worker starts')
            add(server, 11, 10)
            assert counted(server, route='/plants') == 20
            server.signal(signal.SIGTERM)
            server.wait()
            wait_until(lambda: 'promoted' in server.log, 'the new master takes over')
            add(server, 21, 10)
            assert counted(server, route='/plants') == 30
        finally:
            os.kill(new, signal.SIGTERM)
            wait_until(lambda: not is_alive(new), 'it ends')
    assert not directory.exists()


def test_metrics_after_a_failed_upgrade(tmp_path):
    """A new master that ends leaves the counters to the old one."""
    with Server(tmp_path, command=SCRIPT, PLANTS_METRICS='1') as server:
        add(server, 1, 10)
        new = upgrade(server)
        wait_until(lambda: len(server.worker_pids()) == 2, 'a new worker starts')
        os.kill(new, signal.SIGTERM)
        wait_until(lambda: not is_alive(new), 'it ends')
        assert counted(server, route='/plants') == 10
        directory = directory_of(min(server.worker_pids()))
    assert not directory.exists()


def test_foreign_directory_of_counters(tmp_path):
    """A directory that somebody else has set is neither used nor removed."""
    foreign = tmp_path / 'foreign'
    foreign.mkdir()
    for metrics in ('0', '1'):
        settings = {'PLANTS_METRICS': metrics, 'PROMETHEUS_MULTIPROC_DIR': str(foreign)}
        with Server(tmp_path, **settings) as server:
            add(server, 1, 1)
        assert list(foreign.iterdir()) == []


def test_metrics_of_another_server(tmp_path):
    """A server with one process counts in that process."""
    for name in ROOMS:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    command = [SCRIPTS / 'waitress-serve', '--listen=127.0.0.1:0', 'app:app']
    with Server(tmp_path, command=command, workers=None, PLANTS_METRICS='1') as server:
        add(server, 1, 3)
        assert counted(server, route='/plants') == 3


def test_metrics_know_the_workers_of_a_reload(tmp_path):
    """What an old worker leaves behind is not what a new one needs."""
    with Server(tmp_path, workers=2, PLANTS_METRICS='1') as server:
        add(server, 1, 1)
        directory = directory_of(next(iter(server.worker_pids())))

        def are_known():
            pids = set()
            for path in directory.glob('*.pid'):
                with suppress(FileNotFoundError):  # its worker has just ended
                    pids.add(int(path.read_text()))
            return pids == server.worker_pids() and len(pids) == 2

        for _ in range(3):
            old = server.worker_pids()
            server.signal(signal.SIGHUP)
            wait_until(lambda old=old: not old & server.worker_pids(), 'all are new')
            wait_until(are_known, 'just those are known', 5)
