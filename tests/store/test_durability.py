"""No acknowledged plant is lost when processes are killed or files disappear.

Real servers with several workers share one plant file; the tests read the file without
the store.
"""

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from types import SimpleNamespace

import pytest
import server as harness
from errors import assert_error
from server import PATIENCE, REPOSITORY, TOKEN, is_alive, wait_until

WORKERS = 2
CONNECTION_LOST = (OSError, HTTPException)  # as a client of a killed server sees it


class Server(harness.Server):
    """A server that is killed at the end of its test, because that is quick."""

    def kill(self):
        """Kill every process, as the kernel may, and wait until all have ended."""
        workers = self.worker_pids()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        wait_until(lambda: not any(map(is_alive, workers)), 'all have ended')

    def stop(self):
        self.kill()


class Client:
    """A persistent connection to a server; a request after its loss reconnects."""

    def __init__(self, server):
        self._server = server
        self._connection = None

    def get(self, path):
        return self._ask('GET', path, None)

    def post(self, plant):
        return self._ask('POST', '/plants', json.dumps(plant).encode())

    def close(self):
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method, path, body):
        if self._connection is None:
            # Looked up each time: a restarted server has another port.
            port = self._server.port or 0
            self._connection = HTTPConnection('127.0.0.1', port, timeout=PATIENCE)
        headers = {'Authorization': f'Bearer {TOKEN}'}
        if body is not None:
            headers['Content-Type'] = 'application/json'
        try:
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
            body = response.read()
        except BaseException:
            self.close()
            raise
        return SimpleNamespace(
            status_int=response.status,
            headers=response.headers,
            body=body,
            text=body.decode(),
        )


@contextmanager
def client_of_each_worker(server, workers=WORKERS):
    """Yield a connection to each worker."""
    with ExitStack() as opened:
        clients = {}

        def all_reached():
            # Kept open, so that the next connection goes to another worker.
            client = opened.enter_context(closing(Client(server)))
            clients.setdefault(server.worker_of(client.get('/livez')), client)
            return len(clients) == workers

        wait_until(all_reached, 'every worker answers')
        yield list(clients.values())


def fern(id, length=0):
    """Return the plant of an id, with a name of at least this length."""
    return {'id': id, 'name': 'Fern'.ljust(length, '.')}


def fake(id):
    """Return another plant with the id of a fern."""
    return {'id': id, 'name': 'Fake'}


def assert_added(answer):
    """Check that a response acknowledges a plant."""
    assert answer.status_int == 200, answer.text


def assert_refused(answer):
    """Check that a response is 503 and gives a reason, but no path."""
    message = assert_error(answer, 50300)
    assert message.partition(': ')[2]
    assert '/' not in message
    assert 'jsonl' not in message


def write_plants(path, plants):
    """Write a plant file without the store."""
    path.write_text(''.join(f'{json.dumps(plant)}\n' for plant in plants))


def assert_stored(path, plants):
    """Check that a file holds these plants, each once, and nothing else."""
    data = path.read_bytes()
    lines = data.split(b'\n')
    assert lines.pop() == b'', 'the last line has no line feed'
    found = [json.loads(line) for line in lines]
    stored = {plant['id']: plant for plant in found}
    twice = [id for id, count in Counter(p['id'] for p in found).items() if count > 1]
    assert twice == []
    expected = {plant['id']: plant for plant in plants}
    # NOTE: not the dicts: pytest would print the difference of thousands of plants.
    assert [id for id in expected if id not in stored] == [], 'lost'
    assert [id for id in stored if stored[id] != expected.get(id)] == [], 'not as sent'


def assert_no_damage(path):
    """Run the check of the command line; it finds no damage."""
    code, output = command('check', f'jsonl:{path}')
    assert code == 0, output
    assert output.endswith(' plants verified, no damage\n'), output


def assert_remembered(client, plants):
    """Check that repeats are acknowledged, and other plants with their ids refused."""
    for plant in plants:
        assert_added(client.post(plant))
        assert_error(client.post(fake(plant['id'])), 40006)


@pytest.fixture
def path(tmp_path):
    """The path of the plant file, in a directory that tests can rename."""
    directory = tmp_path / 'store'
    directory.mkdir()
    return directory / 'plants.jsonl'


@pytest.fixture
def serve(tmp_path, path):
    """Return a function that makes a server of the plant file."""
    numbers = itertools.count(1)

    def serve(workers=WORKERS):
        directory = tmp_path / f'server-{next(numbers)}'
        directory.mkdir()
        return Server(directory, workers=workers, PLANTS_STORE=f'jsonl:{path}')

    return serve


# ---- killed processes

KILL_SEEDS = range(2)
KILL_ROUNDS = 8
CLIENTS = 8
# The rare long name makes a write of many pages, which a kill can tear.
NAMES = [*('Fern' for _ in range(40)), 'Färn🌿' * 2_000]


class Crowd:
    """Clients that post new plants, each again and again until it is acknowledged.

    Args:
        server: The server, which may be killed at any time.
        acknowledged: A list to which the acknowledged plants are appended.
        ids: An iterator of new ids.
        seed: The seed of the random names and tags.
    """

    def __init__(self, server, acknowledged, ids, seed):
        self._server = server
        self._acknowledged = acknowledged
        self._ids = ids
        self._chances = [random.Random(f'{seed} {number}') for number in range(CLIENTS)]
        self._counts = [0] * CLIENTS
        self._enough = threading.Event()

    def __enter__(self):
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [
            self._pool.submit(self._post_many, number) for number in range(CLIENTS)
        ]
        return self

    def __exit__(self, *exc_info):
        self._enough.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def wait_for_all(self):
        """Wait until the server has acknowledged one more plant of each client."""
        # Two more, because a response from before this call may be counted after it.
        goals = [count + 2 for count in self._counts]

        def goals_are_reached():
            for client in self._clients:
                if client.done():
                    client.result()
            return all(map(int.__ge__, self._counts, goals))

        wait_until(goals_are_reached, 'every client is served')

    def _post_many(self, number):
        chance = self._chances[number]
        with closing(Client(self._server)) as client:
            while not self._enough.is_set():
                plant = {'id': next(self._ids), 'name': chance.choice(NAMES)}
                if chance.random() < 0.5:
                    plant['tag'] = f'client {number}'
                wait_until(
                    lambda plant=plant: self._is_added(client, plant), 'it is added'
                )
                self._acknowledged.append(plant)
                self._counts[number] += 1

    def _is_added(self, client, plant):
        try:
            answer = client.post(plant)
        except CONNECTION_LOST:
            return False
        if answer.status_int != 200:
            assert_error(answer, 50300)
            return False
        return True


@pytest.mark.parametrize('seed', KILL_SEEDS, ids='seed {}'.format)
def test_killed_processes_lose_no_acknowledged_plant(path, serve, seed):
    """Whenever processes are killed, acknowledged plants are stored exactly once.

    After the kill of one worker the service resumes by itself; after the kill of all
    processes it resumes with the next start.
    """
    chance = random.Random(seed)
    acknowledged = []
    ids = itertools.count(1)
    # Three: one may be killed while the replacement of another still starts.
    with serve(workers=3) as server:
        for number in range(KILL_ROUNDS):
            with Crowd(server, acknowledged, ids, f'{seed} {number}') as crowd:
                time.sleep(chance.uniform(0, 0.1))
                if chance.random() < 0.2:
                    server.kill()
                    server.start()
                else:
                    os.kill(chance.choice(sorted(server.worker_pids())), signal.SIGKILL)
                crowd.wait_for_all()
            assert_stored(path, acknowledged)
    assert_no_damage(path)


def test_restart_keeps_every_plant(path, serve):
    """After a server was killed, the next one has every plant."""
    plants = [fern(id) for id in range(30)]
    with serve() as server, client_of_each_worker(server) as clients:
        for client, plant in zip(itertools.cycle(clients), plants):
            assert_added(client.post(plant))
        server.kill()
    before = path.read_bytes()
    with serve() as server, client_of_each_worker(server) as clients:
        for client in clients:
            assert_remembered(client, plants)
        assert path.read_bytes() == before


# ---- several servers


def test_clients_that_race_for_an_id_have_one_winner(path, serve):
    """Of clients that add different plants with one id, on two servers, one wins."""
    ids = range(200)
    block = 25
    with serve(workers=4) as one, serve(workers=4) as other:
        servers = [one, other] * 4
        # They start each block together; otherwise the fastest client wins every id.
        barrier = threading.Barrier(len(servers), timeout=PATIENCE)

        def post_all(number):
            answers = []
            with closing(Client(servers[number])) as client:
                for id in ids:
                    if id % block == 0:
                        barrier.wait()
                    plant = {'id': id, 'name': f'of client {number}'}
                    answers.append((plant, client.post(plant)))
            return answers

        with ThreadPoolExecutor(len(servers)) as pool:
            outcomes = list(pool.map(post_all, range(len(servers))))

        winners = []
        for plant, answer in itertools.chain(*outcomes):
            if answer.status_int == 200:
                winners.append(plant)
            else:
                assert_error(answer, 40006)
    assert sorted(plant['id'] for plant in winners) == list(ids)
    assert_stored(path, winners)
    assert len({plant['name'] for plant in winners}) > 1, 'there was no race'


# ---- a file that is replaced, and restored


@contextmanager
def removed(path):
    """Remove a file, and restore it from a hard link."""
    kept = path.with_name('kept')
    kept.hardlink_to(path)
    path.unlink()
    yield
    kept.rename(path)


@contextmanager
def renamed(path):
    """Rename a file, and rename it back."""
    aside = path.rename(path.with_name('aside'))
    yield
    aside.rename(path)


@contextmanager
def replaced(path):
    """Replace a file by another plant file, and restore it."""
    with renamed(path):
        # Longer than the original, so that the size alone does not reveal it.
        write_plants(path, [fern(id) for id in range(50, 100)])
        yield


@contextmanager
def cut_short(path):
    """Copy an older version over a file, and restore it; the inode stays."""
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b'\n', 0, -1) + 1])
    yield
    with path.open('r+b') as file:
        file.write(data)


@contextmanager
def directory_renamed(path):
    """Rename the directory of a file, and rename it back."""
    aside = path.parent.rename(path.parent.with_name('aside'))
    yield
    aside.rename(path.parent)


@contextmanager
def directory_replaced(path):
    """Put an empty directory in place, as when a file system is unmounted."""
    with directory_renamed(path):
        path.parent.mkdir()
        yield
        shutil.rmtree(path.parent)


GONE = {
    'removed': removed,
    'directory renamed': directory_renamed,
    'directory replaced': directory_replaced,
}
CHANGED = {'renamed': renamed, 'replaced': replaced, 'cut short': cut_short}
PLANTS = [fern(id) for id in range(10, 20)]


def add_first_plants(clients):
    """Add PLANTS by way of every worker; the first one has seen only some of them."""
    for client, plant in zip(clients, PLANTS, strict=False):
        assert_added(client.post(plant))
    for plant in PLANTS:
        assert_added(clients[-1].post(plant))


def assert_out_of_service(path, clients):
    """Check that workers are live but not ready, and make or change no file."""

    def files():
        directory = path.parent.parent
        return {
            file: file.read_bytes()
            for file in directory.rglob('*')
            # The index does not count: it is disposable.
            if file.is_file() and not file.match('*.index*') and file.suffix != '.log'
        }

    before = files()
    for client in clients:
        assert_refused(client.get('/readyz'))
        assert_refused(client.post(fern(1)))
        assert_refused(client.get('/readyz'))
        assert client.get('/livez').status_int == 200
    assert files() == before


def assert_in_service(path, clients):
    """Check that workers are ready, know every plant and take new ones."""
    plants = [*PLANTS]
    for number, client in enumerate(clients):
        assert client.get('/readyz').status_int == 200
        plants.append(fern(number))
        assert_added(client.post(plants[-1]))
        assert_remembered(client, plants)
    assert_stored(path, plants)


def test_changed_file_is_refused_until_restored(path, serve, subtests):
    """Workers refuse a missing, replaced or cut file, until the original is back."""
    with serve() as server, client_of_each_worker(server) as clients:
        add_first_plants(clients)
        for name, swap in (GONE | CHANGED).items():
            with subtests.test(name):
                with swap(path):
                    assert_out_of_service(path, clients)
                assert_in_service(path, clients)


def wait_for_new_workers(server, old, workers=WORKERS):
    """Wait until a server has all its workers, and none of the old ones."""

    def are_there():
        pids = server.worker_pids()
        return len(pids) == workers and not pids & old

    wait_until(are_there, 'there are new workers')


def test_worker_that_starts_without_the_file_makes_none(path, serve, subtests):
    """Workers that replace killed ones make no file, and serve when it is back."""
    with serve() as server:
        with client_of_each_worker(server) as clients:
            add_first_plants(clients)
        for name, swap in GONE.items():
            with subtests.test(name):
                with swap(path):
                    killed = server.worker_pids()
                    for pid in killed:
                        os.kill(pid, signal.SIGKILL)
                    wait_for_new_workers(server, killed)
                    with client_of_each_worker(server) as clients:
                        assert_out_of_service(path, clients)
                assert is_alive(server.pid)
                with client_of_each_worker(server) as clients:
                    assert_in_service(path, clients)


@contextmanager
def reloaded(server, workers=WORKERS):
    """Reload a server; yield a connection to each of its new workers."""
    old = server.worker_pids()
    server.signal(signal.SIGHUP)
    wait_for_new_workers(server, old, workers)
    with client_of_each_worker(server, workers) as clients:
        yield clients


@pytest.mark.parametrize('swap', [removed, directory_replaced])
def test_reload_without_file_makes_an_empty_store(path, serve, swap):
    """A reload accepts that the file is gone: workers start with an empty store."""
    with serve() as server:
        with client_of_each_worker(server) as clients:
            add_first_plants(clients)
        with swap(path):
            with reloaded(server) as clients:
                for number, client in enumerate(clients):
                    assert client.get('/readyz').status_int == 200
                    assert_added(client.post(fake(PLANTS[number]['id'])))
            assert_stored(path, [fake(plant['id']) for plant in PLANTS[:2]])
            assert path.stat().st_mode & 0o777 == 0o600


def test_reload_accepts_another_file(path, serve):
    """A reload accepts the file that is there now: workers serve its plants."""
    with serve() as server:
        with client_of_each_worker(server) as clients:
            add_first_plants(clients)
        with replaced(path):
            present = [json.loads(line) for line in path.read_bytes().splitlines()]
            with reloaded(server) as clients:
                for client in clients:
                    assert_added(client.post(fake(PLANTS[-1]['id'])))
                    assert_remembered(client, present)
            assert_stored(path, [*present, fake(PLANTS[-1]['id'])])


# ---- a file that is cut short


def command(*arguments):
    """Run a command of the store; return its exit code and its output."""
    run = subprocess.run(
        [sys.executable, '-m', 'store', *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return run.returncode, run.stdout + run.stderr


def assert_accepted_with_repair(path, plants):
    """Accept the loss of a file that was cut short, as its messages say."""
    for repair in [], ['--repair']:
        code, output = command('check', *repair, f'jsonl:{path}')
        assert code == (not repair), output
        assert 'bytes at its end are missing' in output
    assert_stored(path, plants)
    assert_no_damage(path)


def test_file_cut_short_under_a_server_is_refused(path, serve, tmp_path):
    """Whoever is asked refuses a file that was cut short, whatever happened since."""
    old = tmp_path / 'old.jsonl'
    with serve() as server:
        with client_of_each_worker(server) as (asked, other):
            assert_added(asked.post(fern(1)))
            shutil.copy(path, old)
            assert_added(asked.post(fern(100)))
            shutil.copyfile(old, path)
            assert_refused(other.post(fake(100)))
            assert_refused(asked.post(fake(100)))
            killed = {server.worker_of(asked.get('/livez'))}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for_new_workers(server, killed)
        code, output = command('copy', f'jsonl:{old}', f'jsonl:{path}')
        assert code == 1
        assert 'cut short' in output
        os.utime(path)
        server.signal(signal.SIGHUP)
        wait_until(lambda: 'Not reloaded' in server.log, 'the reload is refused')
        with client_of_each_worker(server) as clients:
            assert_out_of_service(path, clients)
        assert path.read_bytes() == old.read_bytes()
        assert_accepted_with_repair(path, [fern(1)])
        with reloaded(server) as clients:
            assert_added(clients[0].post(fake(100)))
            assert_error(clients[1].post(fern(100)), 40006)
            assert_remembered(clients[1], [fern(1)])


def test_file_cut_short_while_stopped_is_refused(path, serve):
    """A server does not start with a file that was cut short, and says what to do."""
    with serve() as server, client_of_each_worker(server) as clients:
        for id in 1, 2:
            assert_added(clients[0].post(fern(id)))
        server.signal(signal.SIGTERM)
        server.wait()
    lost = len(json.dumps(fern(2), separators=(',', ':'))) + 1
    os.truncate(path, path.stat().st_size - lost)
    refused = serve()
    refused.start()
    assert refused.wait() == 1
    assert f'{lost} bytes at its end are missing' in refused.log
    assert f'python -m store check --repair jsonl:{path}' in refused.log
    assert_accepted_with_repair(path, [fern(1)])
    with serve() as server, client_of_each_worker(server) as clients:
        assert_added(clients[0].post(fake(2)))
        assert_error(clients[1].post(fern(2)), 40006)
        assert_remembered(clients[1], [fern(1)])


# ---- a full disk


class LimitedFiles:
    """A limit to the size of files, which writes see as a full disk."""

    def leave_room(self, server, room):
        self._limit(server, room)

    def give_room(self, server):
        self._limit(server, resource.RLIM_INFINITY)

    def _limit(self, server, size):
        for pid in {server.pid, *server.worker_pids()}:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_full_disk_loses_no_plant(path, serve):
    """On a full disk adds are refused; once there is room they work again."""
    plants = [*PLANTS]
    full_disk = LimitedFiles()
    with serve() as server, client_of_each_worker(server) as clients:
        add_first_plants(clients)
        full_disk.leave_room(server, room=100_000)
        for client, id in zip(itertools.cycle(clients), itertools.count(100)):
            plant = fern(id, 1_000)
            if client.post(plant).status_int != 200:
                break
            plants.append(plant)
        for client in clients:
            assert_refused(client.post(plant))
            assert_refused(client.get('/readyz'))
            assert_remembered(client, plants[-3:])
        assert_stored(path, plants)
        assert_no_damage(path)
        full_disk.give_room(server)
        for client in reversed(clients):
            assert_added(client.post(plant))
            assert client.get('/readyz').status_int == 200
        plants.append(plant)
        assert_stored(path, plants)
        assert_remembered(clients[0], plants)
    assert_no_damage(path)
