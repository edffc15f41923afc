"""Metrics of a server with several processes: each worker reports the sum of all."""

import os
import re
import signal
from pathlib import Path

from exchange import parse_samples
from machine import upgraded
from server import Server, is_alive, request, wait_until


def read_samples(server, name, **labels):
    """Return the samples that have a name and labels."""
    answer = server.ask(request('GET', '/metrics'))
    assert answer.status == 200
    return [
        sample
        for sample in parse_samples(answer.body.decode())
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def read_metric(server, name='plants_request_seconds_count', **labels):
    """Return the sum of the samples that have a name and labels."""
    return sum(sample.value for sample in read_samples(server, name, **labels))


def counters_directory(pid):
    """Return the directory of the counters that a process has mapped."""
    maps = Path(f'/proc/{pid}/maps').read_text()
    return Path(re.search(r'(/\S*/plants-counters-[^/]+)/', maps)[1])


def add_plants(server, first, number):
    """Add plants, each on a connection of its own, so that every worker gets some."""
    for id in range(first, first + number):
        assert server.ask(request(body={'id': id, 'name': 'Fern'})).status == 200


def test_each_worker_reports_the_sum_of_all(tmp_path):
    """Each worker reports what all have counted, with the syncs of the store."""
    with Server(tmp_path, workers=2, PLANTS_METRICS='1') as server:
        add_plants(server, 1, 20)
        for _ in range(4):
            assert read_metric(server, route='/plants', status='200', error='0') == 20
        assert read_metric(server, 'plants_store_sync_seconds_count') == 20
        assert read_metric(server, 'plants_store_batch_plants_sum') == 20
        assert server.ask(b'GET / HTTP/9\r\n\r\n').status == 400  # by the server itself
        assert read_metric(server, status='400', error='40000') == 1
        assert read_metric(server, 'plants_requests_in_progress') == 1  # this one
        directory = counters_directory(next(iter(server.worker_pids())))
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_counts_survive_killed_and_reloaded_workers(tmp_path):
    """Killed workers and reloads lose no count but of what was in progress."""
    name = 'plants_requests_in_progress'
    with (
        Server(tmp_path, workers=2, PLANTS_METRICS='1') as server,
        server.connect() as client,
    ):
        add_plants(server, 1, 10)
        client.send(request(body=b'{"id"', content_length='100'))
        wait_until(lambda: read_metric(server, name) == 2, 'it has begun')
        victims = server.worker_pids()
        directory = counters_directory(max(victims))
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(server.worker_pids() - victims) == 2, 'others start')
        wait_until(lambda: not any(map(is_alive, victims)), 'they have ended')
        for path in directory.glob('*.pid'):  # of other processes, with long ids
            path.write_text('9' * 10)
        assert read_metric(server, name) == 1  # this very request
        assert read_metric(server, 'process_start_time_seconds') > 0
        add_plants(server, 11, 10)
        assert read_metric(server, route='/plants') == 20
        for _ in range(2):
            server.reload()
            wait_until(lambda: len(server.worker_pids()) == 2, 'there are no more')
            processes = read_samples(server, 'process_start_time_seconds')
            numbers = {sample.labels['process'] for sample in processes}
            assert set() < numbers < set('0123')
            files = {path.stem.split('_')[-1] for path in directory.glob('*_[0-9]*.db')}
            assert files <= set('0123')
        add_plants(server, 21, 10)
        assert read_metric(server, route='/plants') == 30
    assert not directory.exists()


def test_counts_survive_an_upgrade(tmp_path):
    """Workers of both masters report all counts; the last master removes the files."""
    with Server(tmp_path, PLANTS_METRICS='1') as server:
        directory = counters_directory(*server.worker_pids())
        add_plants(server, 1, 10)
        with upgraded(server):
            add_plants(server, 11, 10)
            assert read_metric(server, route='/plants') == 20
        # The new master has ended, and leaves the counters to the old one.
        assert read_metric(server, route='/plants') == 20
        with upgraded(server):
            server.signal(signal.SIGTERM)
            server.wait()
            wait_until(lambda: 'promoted' in server.log, 'the new master takes over')
            add_plants(server, 21, 10)
            assert read_metric(server, route='/plants') == 30
        assert not directory.exists()


def test_directory_from_outside_is_left_alone(tmp_path):
    """Only a directory that a server has made is used, and removed at the end."""
    victim = tmp_path / 'plants-counters-of-somebody'
    victim.mkdir()
    (victim / 'precious').touch()
    environ = {'PLANTS_METRICS': '1', 'GUNICORN_COUNTERS': str(victim)}
    with Server(tmp_path, **environ) as server:
        assert counters_directory(*server.worker_pids()) != victim
    assert [path.name for path in victim.iterdir()] == ['precious']
