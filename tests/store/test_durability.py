"""No acknowledged plant is lost when processes are killed or files disappear.

Real servers with several workers use one plant file; the tests read the file without
the store.
"""

import itertools
import json
import os
import random
import resource
import signal
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from disk import raw_plants
from exchange import Crowd, assert_error
from server import Server, request

from store import Plant

WORKERS = 2


def plant_of(id, name='Fern'):
    """Return a plant with this id."""
    return {'id': id, 'name': name}


def post(client, plant):
    """Send a plant; return the answer."""
    return client.ask(request(body=plant))


def assert_added(client, *plants):
    """Check that plants are acknowledged."""
    assert [post(client, plant).status for plant in plants] == [200] * len(plants)


def assert_remembered(client, plants):
    """Check that repeats are acknowledged, and other plants with their ids refused."""
    assert_added(client, *plants)
    for plant in plants:
        assert_error(post(client, plant_of(plant['id'], 'Fake')), 40006)


def is_ready(client):
    """Return whether a worker is ready."""
    answer = client.ask(request('GET', '/readyz'))
    if answer.status != 200:
        assert_error(answer, 50300)
    return answer.status == 200


def assert_stored(path, plants):
    """Check that a file holds these plants, each once, and nothing else."""
    found = Counter(raw_plants(path.read_bytes()))
    sent = Counter(Plant(**plant) for plant in plants)
    # NOTE: not the counters: pytest would print the difference of thousands of plants.
    assert list(sent - found) == [], 'lost'
    assert list(found - sent) == [], 'twice, or not as sent'


def test_killed_processes_lose_no_acknowledged_plant(tmp_path, path):
    """Whenever processes are killed, acknowledged plants are stored exactly once."""
    chance = random.Random(0)
    acknowledged = []
    ids = itertools.count(1)
    # Three: one may be killed while the replacement of another still starts.
    with Server(tmp_path, workers=3) as server:
        for number in range(16):
            with Crowd(server, acknowledged, ids, number) as crowd:
                time.sleep(chance.uniform(0, 0.1))
                if number % 5 == 4:
                    os.killpg(server.pid, signal.SIGKILL)
                    server.wait()
                    server.start()
                else:
                    os.kill(chance.choice(sorted(server.worker_pids())), signal.SIGKILL)
                crowd.wait_for_all()
            assert_stored(path, acknowledged)


@contextmanager
def replaced(path, others):
    """Replace a file by one of other plants, or by none; put it back at the end."""
    kept = path.rename(path.with_name('kept'))
    if others:
        path.write_text(''.join(f'{json.dumps(plant)}\n' for plant in others))
    yield
    kept.replace(path)


PLANTS = [plant_of(id) for id in range(10, 20)]


def add_first_plants(clients):
    """Add PLANTS by way of every worker; the first one has seen only some of them."""
    assert_added(clients[0], PLANTS[0])
    assert_added(clients[1], *PLANTS)


def assert_out_of_service(path, server):
    """Check that workers are live but not ready, and make or change no file."""
    before = path.exists() and path.read_bytes()
    with server.client_of_each_worker() as clients:
        for client in clients:
            assert not is_ready(client)
            assert_error(post(client, plant_of(1)), 50300)
    assert (path.exists() and path.read_bytes()) == before


# Longer than the original, so that the size alone does not reveal it.
@pytest.mark.parametrize('others', [[], [plant_of(id) for id in range(50, 100)]])
def test_replaced_file_is_refused_until_a_reload(tmp_path, path, others):
    """Old and new workers refuse a missing or another file, which a reload accepts."""
    plants = [*PLANTS]
    with Server(tmp_path, workers=WORKERS) as server:
        with server.client_of_each_worker() as clients:
            add_first_plants(clients)
        with replaced(path, others):
            assert_out_of_service(path, server)
            for pid in server.worker_pids():
                os.kill(pid, signal.SIGKILL)
            assert_out_of_service(path, server)
        with server.client_of_each_worker() as clients:
            for number, client in enumerate(clients):
                assert is_ready(client)
                plants.append(plant_of(number))
                assert_remembered(client, plants)
        assert_stored(path, plants)
        with replaced(path, others):
            plants = [*others, plant_of(PLANTS[-1]['id'], 'Moss')]
            server.reload()
            with server.client_of_each_worker() as clients:
                for client in clients:
                    assert is_ready(client)
                    assert_added(client, *plants)
            assert_stored(path, plants)


def limit_files(server, size):
    """Limit the size of files, which the writes of a server see as a full disk."""
    for pid in {server.pid, *server.worker_pids()}:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_full_disk_loses_no_plant(tmp_path, path, run):
    """On a full disk adds are refused; once there is room they work again."""
    plants = [*PLANTS]
    with (
        Server(tmp_path, workers=WORKERS) as server,
        server.client_of_each_worker() as clients,
    ):
        add_first_plants(clients)
        limit_files(server, 100_000)
        for client, id in zip(itertools.cycle(clients), itertools.count(100)):
            plant = plant_of(id, 'Fern' * 250)
            if post(client, plant).status != 200:
                break
            plants.append(plant)
        for client in clients:
            assert_error(post(client, plant), 50300)
            assert not is_ready(client)
            assert_remembered(client, plants[-3:])
        assert_stored(path, plants)
        limit_files(server, resource.RLIM_INFINITY)
        for client in reversed(clients):
            assert_added(client, plant)
            assert is_ready(client)
        plants.append(plant)
        assert_stored(path, plants)
        assert_remembered(clients[0], plants)
    assert run('check', path)[0] == 0
