"""What happens to acknowledged plants when processes die and files go away.

Real servers with several workers on one file of JSON lines; what is in the file is read
without the store.
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
from contextlib import ExitStack
from contextlib import closing
from contextlib import contextmanager
from contextlib import suppress
from http.client import HTTPConnection
from http.client import HTTPException
from types import SimpleNamespace

import pytest
import server as harness
from errors import assert_error
from server import PATIENCE
from server import REPOSITORY
from server import TOKEN
from server import is_alive
from server import wait_until

WORKERS = 2
LOST = (OSError, HTTPException)  # what a client sees when its server dies


class Server(harness.Server):
    """One that is killed in the end: what is tested is over, and this is quick."""

    def kill(self):
        """Kill every process, as the kernel may, and wait for the end of all."""
        workers = self.worker_pids()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        wait_until(lambda: not any(map(is_alive, workers)), 'all have ended')

    def stop(self):
        self.kill()


class Client:
    """A kept connection to a server; when it is lost the next request makes another."""

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
            # Looked up each time: a server that was started again has another one.
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

        def all_met():
            # Kept open, so that the next one goes to another worker.
            client = opened.enter_context(closing(Client(server)))
            clients.setdefault(server.worker_of(client.get('/livez')), client)
            return len(clients) == workers

        wait_until(all_met, 'every worker answers')
        yield list(clients.values())


def post(server, plant):
    """Post a plant on a connection of its own."""
    with closing(Client(server)) as client:
        return client.post(plant)


def fern(id, length=0):
    """Return the plant of an id, with a name as long as it must be."""
    return {'id': id, 'name': 'Fern'.ljust(length, '.')}


def fake(id):
    """Return a plant that is not the fern with the id."""
    return {'id': id, 'name': 'Fake'}


def assert_added(answer):
    """An answer is an acknowledgement."""
    assert answer.status_int == 200, answer.text


def assert_refused(answer):
    """An answer says that the store takes nothing, why, and not where it is."""
    message = assert_error(answer, 50300)
    assert message.partition(': ')[2]
    assert '/' not in message
    assert 'jsonl' not in message


def write_plants(path, plants):
    """Make a file as the store might have written it."""
    path.write_text(''.join(f'{json.dumps(plant)}\n' for plant in plants))


def assert_stored(path, plants):
    """A file has certain plants, each once, and not a byte besides."""
    data = path.read_bytes()
    lines = data.split(b'\n')
    assert lines.pop() == b'', 'the last line has no end'
    found = [json.loads(line) for line in lines]
    stored = {plant['id']: plant for plant in found}
    twice = [id for id, count in Counter(p['id'] for p in found).items() if count > 1]
    assert twice == []
    expected = {plant['id']: plant for plant in plants}
    # Not the dicts themselves: pytest would show the difference of thousands of plants.
    assert [id for id in expected if id not in stored] == [], 'lost'
    assert [id for id in stored if stored[id] != expected.get(id)] == [], 'not as sent'


def assert_no_damage(path):
    """The check that an operator would make finds nothing."""
    command = [sys.executable, '-m', 'store', 'check', f'jsonl:{path}']
    check = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check
    assert check.stdout.endswith(' plants verified, no damage\n'), check


def assert_remembered(client, plants):
    """Plants that were acknowledged are, when repeated, and nothing takes their ids."""
    for plant in plants:
        assert_added(client.post(plant))
        assert_error(client.post(fake(plant['id'])), 40006)


@pytest.fixture
def path(tmp_path):
    """Where the plants are: in a directory that can be taken from under a server."""
    directory = tmp_path / 'store'
    directory.mkdir()
    return directory / 'plants.jsonl'


@pytest.fixture
def serve(tmp_path, path):
    """Return a function that makes a server on the file, in a directory of its own."""
    numbers = itertools.count(1)

    def serve(workers=WORKERS):
        directory = tmp_path / f'server-{next(numbers)}'
        directory.mkdir()
        return Server(directory, workers=workers, PLANTS_STORE=f'jsonl:{path}')

    return serve


# ---- killed processes

KILL_SEEDS = range(2)
KILL_ROUNDS = 20
CLIENTS = 8
# A write of one of the rare long names covers many pages, and can be torn.
NAMES = [*('Fern' for _ in range(40)), 'Färn🌿' * 2_000]


class Crowd:
    """Clients that post new plants, each again and again until it is acknowledged.

    Args:
        server: Which may die at any time.
        acknowledged: Where the plants go that were answered with 200.
        ids: Where new ones come from.
        seed: For what they post.
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
        """Wait until each client has had a plant acknowledged from now on."""
        # Two: the first may have been answered before now, and only be counted after.
        goals = [count + 2 for count in self._counts]

        def reached():
            for client in self._clients:
                if client.done():
                    client.result()
            return all(map(int.__ge__, self._counts, goals))

        wait_until(reached, 'every client is served')

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
        except LOST:
            return False
        if answer.status_int != 200:
            assert_error(answer, 50300)
            return False
        return True


@pytest.mark.parametrize('seed', KILL_SEEDS, ids='seed {}'.format)
def test_kill(path, serve, seed):
    """Whatever is killed at whatever moment, acknowledged plants are stored, once.

    When it is one worker the service resumes by itself; when it is all of them it does
    once it is started again.
    """
    chance = random.Random(seed)
    acknowledged = []
    ids = itertools.count(1)
    # One worker may die while the one that was killed before it still starts.
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


@pytest.mark.parametrize(
    'end',
    [lambda server: server.signal(signal.SIGTERM), Server.kill],
    ids=['terminated', 'killed'],
)
def test_restart(path, serve, end):
    """After a server has ended in any way, the next one has every plant."""
    plants = [fern(id) for id in range(30)]
    with serve() as server:
        with client_of_each_worker(server) as clients:
            for client, plant in zip(itertools.cycle(clients), plants):
                assert_added(client.post(plant))
        end(server)
        server.wait()
    assert_stored(path, plants)
    before = path.read_bytes()
    with serve() as server, client_of_each_worker(server) as clients:
        for client in clients:
            assert_remembered(client, plants)
        assert path.read_bytes() == before
        assert_added(clients[0].post(fern(30)))
    assert_stored(path, [*plants, fern(30)])


# ---- several servers


def test_race(path, serve):
    """Of all who want an id at the same time, whichever server they ask, one has it."""
    ids = range(300)
    block = 25
    with serve(workers=4) as one, serve(workers=4) as other:
        servers = [one, other] * 4
        # They start on each block together, or the quickest would be first everywhere.
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


# ---- a file that is taken away, and comes back


@contextmanager
def removed(path):
    """Remove a file; it can come back since it has another name."""
    kept = path.with_name('kept')
    kept.hardlink_to(path)
    path.unlink()
    yield
    kept.rename(path)


@contextmanager
def renamed(path):
    """Give a file another name."""
    aside = path.rename(path.with_name('aside'))
    yield
    aside.rename(path)


@contextmanager
def renamed_with_index(path):
    """Leave nothing that tells that a file was there."""
    index = path.with_name(f'{path.name}.index')
    with renamed(path):
        aside = index.rename(index.with_name('aside-index'))
        yield
        aside.rename(index)


@contextmanager
def replaced(path):
    """Put another file of plants in the place of one."""
    with renamed(path):
        # Longer than the one, so that its size does not give it away.
        write_plants(path, [fern(id) for id in range(50, 100)])
        yield


def cut_to(fraction):
    """Return what cuts a file short, and brings back what was cut off."""

    @contextmanager
    def cut(path):
        data = path.read_bytes()
        os.truncate(path, int(fraction * len(data)))
        yield
        with path.open('r+b') as file:
            file.write(data)

    return cut


@contextmanager
def directory_renamed(path):
    """Give the directory of a file another name."""
    aside = path.parent.rename(path.parent.with_name('aside'))
    yield
    aside.rename(path.parent)


@contextmanager
def directory_replaced(path):
    """Do what happens when a file system is not mounted any more."""
    with directory_renamed(path):
        path.parent.mkdir()
        yield
        shutil.rmtree(path.parent)


GONE = {
    'removed': removed,
    'renamed': renamed,
    'renamed with its index': renamed_with_index,
    'directory renamed': directory_renamed,
    'directory replaced': directory_replaced,
}
CHANGED = {
    'replaced': replaced,
    'cut in a line': cut_to(0.55),
    'cut between lines': cut_to(0.5),
    'emptied': cut_to(0),
}
PLANTS = [fern(id) for id in range(10, 20)]


def swapped(table):
    """Parametrize with what is done to the file."""
    return pytest.mark.parametrize('swap', list(table.values()), ids=list(table))


def add_first_plants(clients):
    """Let every worker open the file; the first knows only its beginning."""
    for client, plant in zip(clients, PLANTS, strict=False):
        assert_added(client.post(plant))
    for plant in PLANTS:
        assert_added(clients[-1].post(plant))


def assert_out_of_service(path, clients):
    """Workers say that they live and take no plants; no file is made or changed."""

    def files():
        directory = path.parent.parent
        return {
            file: file.read_bytes()
            for file in directory.rglob('*')
            # An index is none of these: it is rebuilt when it has to be.
            if file.is_file() and not file.match('*.index') and file.suffix != '.log'
        }

    before = files()
    for client in clients:
        assert_refused(client.get('/readyz'))
        assert_refused(client.post(fern(1)))
        assert_refused(client.get('/readyz'))
        assert client.get('/livez').status_int == 200
    assert files() == before


def assert_in_service(path, clients):
    """Workers have every plant of before, and take new ones."""
    plants = [*PLANTS]
    for number, client in enumerate(clients):
        assert client.get('/readyz').status_int == 200
        plants.append(fern(number))
        assert_added(client.post(plants[-1]))
        assert_remembered(client, plants)
    assert_stored(path, plants)


def test_swap(path, serve, subtests):
    """A file that is not the one that was opened is not used until that one is back."""
    with serve() as server, client_of_each_worker(server) as clients:
        add_first_plants(clients)
        for name, swap in (GONE | CHANGED).items():
            with subtests.test(name):
                with swap(path):
                    assert_out_of_service(path, clients)
                assert_in_service(path, clients)


def wait_for_new_workers(server, old, workers=WORKERS):
    """Wait until a server has workers again, and none of the old ones."""

    def are_there():
        pids = server.worker_pids()
        return len(pids) == workers and not pids & old

    wait_until(are_there, 'there are new workers')


def test_worker_dies_while_file_is_gone(path, serve, subtests):
    """A worker that starts without the file makes none, and serves when it is back."""
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
    """Reload a server, and yield a connection to each of its new workers."""
    old = server.worker_pids()
    server.signal(signal.SIGHUP)
    wait_for_new_workers(server, old, workers)
    with client_of_each_worker(server, workers) as clients:
        yield clients


@swapped({name: swap for name, swap in GONE.items() if name != 'directory renamed'})
def test_reload_without_file(path, serve, swap):
    """A reload is how an operator says that an empty store is meant."""
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


def test_reload_with_a_file_cut_in_a_line(path, serve):
    """Half of an acknowledged plant is no torn tail: a reload is refused."""
    with serve() as server, client_of_each_worker(server) as clients:
        add_first_plants(clients)
        with CHANGED['cut in a line'](path):
            server.signal(signal.SIGHUP)
            wait_until(lambda: 'Not reloaded' in server.log, 'it is refused')
            assert 'is damaged' in server.log
            assert_out_of_service(path, clients)
        assert_in_service(path, clients)


@swapped({name: swap for name, swap in CHANGED.items() if name != 'cut in a line'})
def test_reload_with_changed_file(path, serve, swap):
    """A reload is how an operator says that a file is meant as it is now."""
    with serve() as server:
        with client_of_each_worker(server) as clients:
            add_first_plants(clients)
        with swap(path):
            lines = path.read_bytes().splitlines(keepends=True)
            meant = [json.loads(line) for line in lines if line.endswith(b'\n')]
            with reloaded(server) as clients:
                for client in clients:
                    assert_added(client.post(fake(PLANTS[-1]['id'])))
                    assert_remembered(client, meant)
            assert_stored(path, [*meant, fake(PLANTS[-1]['id'])])


# ---- a full disk


class SmallFileSystem:
    """A file system with a file that can be spared."""

    knows_its_room = True

    def __init__(self, directory):
        self._directory = directory
        self._ballast = directory / 'ballast'
        self._ballast.touch()

    def leave(self, server, room):
        status = os.statvfs(self._directory)
        size = self._ballast.stat().st_size + status.f_bavail * status.f_bsize - room
        self._ballast.write_bytes(bytes(size))

    def give_room(self, server):
        self._ballast.unlink()


class LimitedFiles:
    """A limit to the size of files, for who may not mount; it looks like a full disk.

    But for one thing: it does not show before something is written.
    """

    knows_its_room = False

    def leave(self, server, room):
        self._limit(server, room)

    def give_room(self, server):
        self._limit(server, resource.RLIM_INFINITY)

    def _limit(self, server, size):
        for pid in {server.pid, *server.worker_pids()}:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def mount_small(directory):
    """Return whether a file system of 1 MiB could be mounted."""
    command = ['mount', '-t', 'tmpfs', '-o', 'size=1m', 'plants', directory]
    return subprocess.run(command, check=False).returncode == 0


def unmount(directory):
    """Return whether a file system could be unmounted."""
    return subprocess.run(['umount', directory], check=False).returncode == 0


@pytest.fixture(params=['small file system', 'limited files'])
def full_disk(request, path):
    """A way to fill what the plants are on, and to make room again."""
    if request.param == 'small file system' and mount_small(path.parent):
        try:
            yield SmallFileSystem(path.parent)
        finally:
            # A thread of a process that was killed may outlive it for a moment.
            wait_until(lambda: unmount(path.parent), 'nobody uses the file system')
    else:
        yield LimitedFiles()


def test_full_disk(path, serve, full_disk):
    """A full disk costs no plant, and when there is room again adds work again."""
    plants = [*PLANTS]
    with serve() as server, client_of_each_worker(server) as clients:
        add_first_plants(clients)
        full_disk.leave(server, room=100_000)
        for client, id in zip(itertools.cycle(clients), itertools.count(100)):
            plant = fern(id, 1_000)
            if client.post(plant).status_int != 200:
                break
            plants.append(plant)
        for client in clients:
            assert_refused(client.post(plant))
            if full_disk.knows_its_room:
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


@pytest.mark.parametrize('full_disk', ['small file system'], indirect=True)
def test_index_cannot_grow(path, serve, full_disk):
    """A service that cannot add, since its index finds no room to grow, says so."""
    if not full_disk.knows_its_room:
        return  # a limit cannot be seen beforehand, by whatever is asked
    # So many that the first buckets are full, and then the index has to grow.
    plants = [fern(id) for id in range(2_300)]
    write_plants(path, plants)
    with serve(workers=1) as server, closing(Client(server)) as client:
        for id in range(2_300, 3_000):
            if id % 50 == 0:
                # Always enough for plants, never for a growing index.
                full_disk.leave(server, room=8_192)
            answer = client.post(fern(id))
            if answer.status_int != 200:
                break
        assert client.get('/readyz').status_int == answer.status_int
