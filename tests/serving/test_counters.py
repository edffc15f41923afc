"""Metrics of a server with several processes: each worker reports the sum of all."""

import os
import signal
from contextlib import suppress

from exchange import assert_error, fern, parse_samples
from server import GUNICORN, Server, in_namespace, request, wait_until

TOKEN = 'a-token-for-the-metrics-alone'
ADDS = 'plants_request_seconds_count'
METRICS = request('GET', '/metrics', authorization=f'Bearer {TOKEN}')


def read(server, name, **labels):
    """Return the sum of the samples that have a name and labels."""
    samples = parse_samples(server.ask(METRICS).body.decode())
    ours = (each for each in samples if each.name == name)
    return sum(each.value for each in ours if labels.items() <= each.labels.items())


def add_plants(server, number):
    """Add new plants, each on a connection of its own."""
    for _ in range(number):
        assert server.ask(request(body=fern())).status == 200


def test_each_worker_reports_what_all_have_counted(tmp_path):
    """Also of workers that were killed or replaced; only that token reads it."""
    place = tmp_path / 'place'
    place.mkdir()
    how = {'workers': 2, 'PLANTS_METRICS_TOKEN': TOKEN}
    server = Server(tmp_path, '--worker-tmp-dir', str(place), **how)
    with server:
        add_plants(server, 20)
        for _ in range(4):
            assert read(server, ADDS, route='/plants', status='200', error='0') == 20
        assert read(server, 'plants_store_batch_plants_sum') == 20
        assert_error(server.ask(request('GET', '/metrics')), 40101)
        [directory] = place.iterdir()
        (directory / 'counter_99.db').touch()
        (directory / 'histogram_99.db').write_text('garbage')
        for _ in range(3):
            victims = server.worker_pids()
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            wait_until(lambda old=victims: len(server.worker_pids() - old) == 2)
            add_plants(server, 5)
        server.reload()
        add_plants(server, 5)
        assert read(server, ADDS, route='/plants', status='200') == 40
        # Of the master, of two workers, and of those that a reload replaces.
        assert len([*directory.glob('histogram_?.db')]) <= 5
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    with server:  # it removes what was left
        [other] = place.iterdir()
        assert other != directory
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not other.exists()


def test_metrics_without_room_stop_no_worker(tmp_path):
    """Plants are added where shared memory is full at the start, or later."""
    (tmp_path / 'place').mkdir()
    for size in ('64k', '1600k', '2600k', '3200k'):
        command = [*in_namespace('--mount'), 'sh', '-c']
        command += [f'mount -t tmpfs -o size={size} none place && exec "$@"', 'sh']
        how = {'command': [*command, *GUNICORN, '--worker-tmp-dir=place']}
        how |= {'workers': 2, 'PLANTS_METRICS_TOKEN': TOKEN}
        with Server(tmp_path, **how) as server:
            workers = server.worker_pids()
            add_plants(server, 10)
            place = f'/proc/{min(workers)}/root/{tmp_path}/place/other'
            with suppress(OSError), open(place, 'wb') as other:
                other.write(bytes(4 * 2**20))
            for path in 4 * ('/plants', '/livez', '/openapi.json', '/docs', '/no'):
                for method in ('GET', 'PUT', 'OPTIONS', 'DELETE'):  # new counters
                    assert server.ask(request(method, path))
            add_plants(server, 10)
            assert read(server, 'plants_store_ready') == 1
            assert server.worker_pids() == workers
            assert size == '3200k' or 'no room' in server.log
