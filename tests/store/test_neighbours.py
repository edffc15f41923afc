"""Several processes on one plant file: killed, stopped, and each other's servers.

The tests read the file without the store.
"""

import itertools
import json
import os
import random
import resource
import signal
import time
from collections import Counter
from contextlib import contextmanager, suppress

import pytest
from disk import append, fill, lines, raw_plants
from exchange import Crowd, assert_error
from machine import locked
from server import Server, request
from waiting import FORK, wait_until

from store import IdTaken, Plant, StoreUnavailable, open_store
from store.jsonl.repair import Verified, verify

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


def add_for_ever(path, name, told):
    """Add random plants in a process; tell a file of each that is acknowledged."""
    chance = random.Random(name)
    with open_store(f'jsonl:{path}', create=False) as store, told.open('ab', 0) as file:
        while True:
            plant = Plant(chance.randrange(3000), name, 'x' * chance.randrange(900))
            with suppress(StoreUnavailable, IdTaken):
                store.add(plant)
                file.write(lines(plant))
                if chance.random() < 0.02:
                    store.load(wait=chance.random() < 0.5)


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_processes_that_are_killed_and_stopped(tmp_path, path):
    """Whatever happens to them: nothing acknowledged is lost, no id given twice."""
    path.touch()
    chance, running = random.Random(0), []

    def start(number):
        arguments = path, f'{number}', tmp_path / f'told-{number}'
        running.append(FORK.Process(target=add_for_ever, args=arguments, daemon=True))
        running[-1].start()

    for number in range(4):
        start(number)
    for number in range(4, 40):
        time.sleep(chance.uniform(0, 0.03))
        stopped, killed = chance.sample(running, 2)
        os.kill(stopped.pid, signal.SIGSTOP)
        os.kill(killed.pid, signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(stopped.pid, signal.SIGCONT)
        running.remove(killed)
        start(number)

    def told():
        return [plant for it in tmp_path.glob('told-*') for plant in whole(it)]

    wait_until(lambda: len(told()) > 500)
    for process in running:
        process.kill()
        process.join()
    fill(path)  # which mends what the last one left
    stored = raw_plants(path.read_bytes())
    assert len({plant.id for plant in stored}) == len(stored)
    assert {*told()} <= {*stored}
    assert verify(path) == Verified(len(stored))


def whole(path):
    """Return the plants of a file whose last line may be torn."""
    return raw_plants(path.read_bytes().rpartition(b'\n')[0] + b'\n')


def test_killed_workers_of_two_servers(tmp_path, path):
    """Whenever processes are killed, acknowledged plants are stored exactly once."""
    chance, ids, acknowledged = random.Random(0), itertools.count(1), []
    shared = {'PLANTS_STORE': f'jsonl:{path}'}
    homes = tmp_path / 'one', tmp_path / 'two'
    for home in homes:
        home.mkdir()
    # Three: one may be killed while the replacement of another still starts.
    with (
        Server(homes[0], workers=3, **shared) as one,
        Server(homes[1], **shared) as two,
    ):
        for number in range(10):
            with (
                Crowd(one, acknowledged, ids, number) as crowd,
                Crowd(two, acknowledged, ids, f'{number} of two') as other,
            ):
                time.sleep(chance.uniform(0, 0.1))
                if number % 5 == 4:
                    os.killpg(one.pid, signal.SIGKILL)
                    one.wait()
                    one.start()
                else:
                    os.kill(chance.choice(sorted(one.worker_pids())), signal.SIGKILL)
                crowd.wait_for_all()
                other.wait_for_all()
            assert_stored(path, acknowledged)


def test_stopped_worker_that_has_the_lock(tmp_path, path):
    """Others answer 503 in time while it is stopped, and go on after it."""
    with (
        Server(tmp_path, workers=WORKERS) as server,
        server.client_of_each_worker() as (client, other),
    ):
        assert_added(client, plant_of(1))
        with locked(path):  # as a process that was stopped with the lock
            began = time.monotonic()
            assert_error(post(client, plant_of(2)), 50300)
            assert time.monotonic() - began < 10  # of 5 for the store
            assert not is_ready(other)
        assert_added(other, plant_of(2))
        assert_remembered(client, [plant_of(1), plant_of(2)])


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


def test_check_beside_a_server_confirms_damage(path):
    """A torn tail that a server mends meanwhile is no damage."""
    two = [Plant(1, 'Fern'), Plant(2, 'Moss')]
    path.write_bytes(lines(*two) + b'{"id":3,"name":"Iv')

    def progress(found):
        for line in found:
            if line.offset == len(lines(*two)):
                fill(path, *(Plant(id, f'Ivy {id}') for id in range(3, 100)))
            yield line

    assert verify(path, progress=progress) == Verified(2)
    assert verify(path) == Verified(99)
    append(path, b'{"id":\n')
    assert len(verify(path).damaged) == 1
