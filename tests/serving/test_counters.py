"""Metrics of a server with several processes: each worker reports the sum of all."""

import os
import signal
from unittest.mock import Mock

from exchange import assert_error, fern, parse_samples
from server import Server, request, wait_until

from serving import master

TOKEN = 'a-token-for-the-metrics-alone'
ADDS = 'plants_request_seconds_count'
METRICS = request('GET', '/metrics', authorization=f'Bearer {TOKEN}')


def read(server, name, **labels):
    """Return the sum of the samples that have a name and labels."""
    samples = parse_samples(server.ask(METRICS).body.decode())
    ours = (each for each in samples if each.name == name)
    return sum(each.value for each in ours if labels.items() <= each.labels.items())


def test_each_worker_reports_what_all_have_counted(tmp_path):
    """Also of workers that were killed or replaced; only that token reads it.

    No file is made, so none can fill memory, nor end a worker where that is full.
    """
    place = tmp_path / 'place'
    place.mkdir()
    how = {'TMPDIR': str(place), 'workers': 2, 'PLANTS_METRICS_TOKEN': TOKEN}
    how |= {'PROMETHEUS_MULTIPROC_DIR': ''}
    with Server(tmp_path, '--worker-tmp-dir', str(place), **how) as server:
        for _ in range(20):
            assert server.ask(request(body=fern())).status == 200
        for _ in range(4):
            assert read(server, ADDS, route='/plants', status='200', error='0') == 20
        assert read(server, 'plants_store_batch_plants_sum') == 20
        assert_error(server.ask(request('GET', '/metrics')), 40101)
        victims = server.worker_pids()
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(server.worker_pids() - victims) == 2)
        assert server.ask(request(body=fern())).status == 200
        server.reload()
        assert server.ask(request(body=fern())).status == 200
        assert read(server, ADDS, route='/plants', status='200') == 22
        assert 'PROMETHEUS_MULTIPROC_DIR' in server.log
        assert [*place.iterdir(), *tmp_path.rglob('*.db')] == []


def test_each_worker_has_the_table_of_a_dead_one(monkeypatch):
    """So memory and work do not grow with each life of a worker."""
    monkeypatch.setattr(signal, 'signal', Mock())  # of this process
    worker = Mock()
    server = Mock(app=worker.app, WORKERS={7: Mock(number=1), 8: Mock(number=3)})
    master.pre_fork(server, worker)
    master.post_worker_init(worker)
    assert worker.app.callable.metrics.number == 2
