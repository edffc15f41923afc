"""Metrics of a server with several processes: each worker reports the sum of all."""

import os
import signal

from exchange import assert_error, fern, parse_samples
from server import Server, request, wait_until

TOKEN = 'a-token-for-the-metrics-alone'
ADDS = 'plants_request_seconds_count'
METRICS = request('GET', '/metrics', authorization=f'Bearer {TOKEN}')


def read(server, name, **labels):
    """Return the sum of the samples that have a name and labels."""
    samples = parse_samples(server.ask(METRICS).body.decode())
    ours = (each for each in samples if each.name == name)
    return sum(each.value for each in ours if labels.items() <= each.labels.items())


def test_each_worker_reports_what_all_have_counted(tmp_path):
    """Also of workers that were killed or replaced; only that token reads it."""
    place = tmp_path / 'place'
    place.mkdir()
    how = {'workers': 2, 'PLANTS_METRICS_TOKEN': TOKEN}
    with Server(tmp_path, '--worker-tmp-dir', str(place), **how) as server:

        def add_plants(number):
            for _ in range(number):  # each on a connection of its own
                assert server.ask(request(body=fern())).status == 200

        add_plants(20)
        for _ in range(4):
            assert read(server, ADDS, route='/plants', status='200', error='0') == 20
        assert read(server, 'plants_store_batch_plants_sum') == 20
        assert_error(server.ask(request('GET', '/metrics')), 40101)
        [directory] = place.iterdir()
        victims = server.worker_pids()
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(server.worker_pids() - victims) == 2, 'others start')
        add_plants(10)
        server.reload()
        add_plants(10)
        assert read(server, ADDS, route='/plants', status='200') == 40
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not directory.exists()
