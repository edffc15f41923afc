"""The worker: one thread serves all clients, so nothing may hold it up."""

import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path

import pytest
from proxy import Proxy
from server import PATIENCE
from server import REPOSITORY
from server import Server
from server import hurried
from server import request
from server import wait_until

CROWD = 40  # more than the worker has threads for what blocks
PROMPT = 2  # seconds that an answer may take on a crowded machine


@pytest.fixture(params=['adds first', 'probes first'])
def asked(request):
    """Return a function that asks for much, and returns who waits for an answer."""

    def ask(server, opened):
        kinds = [[adding(id) for id in range(CROWD)], [probing()] * CROWD]
        if request.param == 'probes first':
            kinds.reverse()
        clients = []
        for data in kinds[0] + kinds[1]:
            clients.append(opened.enter_context(server.connect()))
            clients[-1].send(data)
        return clients

    return ask


def adding(id):
    """Return a request that adds a plant."""
    return request(body={'id': id, 'name': 'Fern'})


def probing():
    """Return a request that asks whether an add would work."""
    return request('GET', '/readyz')


def assert_prompt(server):
    """Check that others are served."""
    for _ in range(5):
        began = time.monotonic()
        assert server.ask(request('GET', '/livez')).status == 200
        assert server.ask(request(authorization=None)).status == 401
        assert time.monotonic() - began < PROMPT


def threads(server):
    """Return how many threads the only worker has."""
    (pid,) = server.worker_pids()
    return len(list(Path(f'/proc/{pid}/task').iterdir()))


@contextmanager
def locked(path):
    """Hold the lock of a plant file, as a process does that builds its index."""
    with path.open('rb') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_file_that_is_locked(tmp_path, asked):
    """While another process has the file, everything else is served."""
    with ExitStack() as opened, Server(tmp_path) as server:
        assert server.ask(adding(-1)).status == 200
        with locked(tmp_path / 'plants.jsonl'):
            clients = asked(server, opened)
            assert_prompt(server)
            assert not any(client.is_readable() for client in clients)
            assert threads(server) <= 20
        assert [client.receive().status for client in clients] == [200] * len(clients)
        assert len(server.lines()) == CROWD + 1


def test_interrupt_while_the_file_is_locked(tmp_path):
    """Ctrl-C ends the server also while an add waits for the file."""
    with Server(tmp_path) as server, server.connect() as client:
        assert server.ask(adding(-1)).status == 200
        with locked(tmp_path / 'plants.jsonl'):
            client.send(adding(1))
            assert_prompt(server)
            server.interrupt()
            assert server.wait(5) == 0
        assert 'ERROR' not in server.log


def test_database_that_hangs(tmp_path, server, url, asked):
    """While the database hangs, everything else is served; then nobody has to wait."""
    with (
        ExitStack() as opened,
        Proxy(server.port) as way,
        Server(
            tmp_path,
            hurried(tmp_path, ANSWER_WITHIN=1),
            PLANTS_STORE=url.replace(str(server.port), str(way.port)),
        ) as service,
    ):
        assert service.ask(adding(-1)).status == 200
        way.stop()
        clients = asked(service, opened)
        assert_prompt(service)
        statuses = {client.receive().status for client in clients}
        assert statuses == {503}
        assert threads(service) <= 30
        way.go_on()
        wait_until(lambda: service.ask(probing()).status == 200, 'it is ready again')
        assert service.ask(adding(1)).status == 200


def test_reader_that_is_slow(tmp_path):
    """A client that does not take its answer keeps nobody else waiting, and gets it."""
    target = '/docs/swagger-ui-bundle.js'
    with Server(tmp_path) as server, ExitStack() as opened:
        whole = server.ask(request('GET', target)).body
        clients = [opened.enter_context(server.connect()) for _ in range(20)]
        for client in clients:
            client.send(request('GET', target) * 3)
        assert_prompt(server)
        for client in clients:
            assert [client.receive().body for _ in range(3)] == [whole] * 3


def test_reader_that_leaves(tmp_path):
    """A client that goes away in the middle of its answer leaves nothing behind."""
    with Server(tmp_path) as server:
        for _ in range(20):
            with server.connect() as client:
                client.send(request('GET', '/docs/swagger-ui-bundle.js') * 3)
                assert client.is_readable(PROMPT)
        assert_prompt(server)
        (pid,) = server.worker_pids()
        files = Path(f'/proc/{pid}/fd')

        def sockets():
            names = []
            for entry in files.iterdir():
                with suppress(FileNotFoundError):  # it was closed in between
                    names.append(os.readlink(entry))
            return sum(name.startswith('socket:') for name in names)

        wait_until(lambda: sockets() < 10, 'their sockets are closed')
        assert 'ERROR' not in server.log


def test_adds_that_come_together(tmp_path):
    """Plants of many connections are stored once each, and each client is answered."""
    with Server(tmp_path) as server, ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in range(CROWD)]
        failed = []

        def add(place, client):
            for number in range(20):
                answer = client.ask(adding(place + CROWD * number))
                if answer.status != 200:
                    failed.append(answer)

        crowd = [threading.Thread(target=add, args=pair) for pair in enumerate(clients)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        assert not failed
        ids = [plant['id'] for plant in server.plants()]
        assert sorted(ids) == list(range(20 * CROWD))


LOADED = """
import importlib.util
import os
import select
import sys
import threading

from store import waiting

spec = importlib.util.spec_from_file_location('configuration', 'gunicorn.conf.py')
configuration = importlib.util.module_from_spec(spec)
spec.loader.exec_module(configuration)
scheduler = configuration.GreenletScheduler(waiting.current)
"""

NEVER_WAITS = """
def serve():
    while True:
        scheduler.give_way()


scheduler.start(serve)
print(scheduler.turn(), scheduler.turn(), flush=True)
os._exit(0)
"""


WORKER = """
from gunicorn.config import Config

worker = configuration.PlantsWorker(1, os.getppid(), [], None, 30, Config(), None)
worker._scheduler = scheduler
"""

DRIPS = f"""
{WORKER}

class Dripping:
    is_idle = False
    events = 0

    def on_event(self, events):
        self.events += 1


class Epoll:
    drips = 50

    def poll(self, timeout):
        self.drips -= 1
        return [(fd, select.EPOLLIN) for fd in clients] if self.drips >= 0 else []


clients = {{-number: Dripping() for number in range(1, 21)}}
worker._epoll = Epoll()
worker._clients = clients
turns = 0
while worker._epoll.drips > 0 or worker._busy:
    worker.wait_for_and_dispatch_events(0)
    turns += 1
print(turns, sorted(client.events for client in clients.values()))
"""


def test_drips_do_not_pile_up():
    """What a client has sent is looked at once, however many packets it came in."""
    turns, *events = map(int, re.findall('[0-9]+', run_loaded(DRIPS)))
    assert turns == 50 + 2  # of twenty clients eight are served in the last turn
    assert sum(events) == 8 * 51 + 4
    assert min(events) >= 50 // 3  # nobody waits for longer than three turns


NO_ROOM = f"""
import errno
import socket
{WORKER}


def fail(*args):
    raise OSError(errno.ENOBUFS, 'no room')


class Listener:
    accept = fail


class Epoll:
    register = fail


worker.accept(Listener())
print(worker._standing_back, worker.nr_conns)
worker._standing_back = False
worker._epoll = Epoll()
with socket.create_server(('127.0.0.1', 0)) as listener:
    client = socket.create_connection(listener.getsockname())
    worker.accept(listener)
    print(worker._standing_back, worker.nr_conns, client.recv(1))
"""


def test_no_room_for_a_connection():
    """A connection that the system cannot hold costs no other one."""
    assert run_loaded(NO_ROOM) == "True 0\nTrue 0 b''\n"


LATE_ANSWER = f"""
import socket
import time
{WORKER}


def serve():
    client.expect_request(15)
    client.sendall(b'an answer')
    client.recv(100)


ours, theirs = socket.socketpair()
client = configuration.ClientSocket(scheduler, ours)
worker._clients = {{ours.fileno(): client}}
scheduler.start(serve)
worker._cap_keepalive(time.monotonic() + 2)
scheduler.turn()
print(theirs.recv(100), client.deadline < time.monotonic() + 2)
"""


def test_answer_at_the_end():
    """A worker that stops soon closes a connection whose answer is sent just then."""
    assert run_loaded(LATE_ANSWER) == "b'an answer' True\n"


@pytest.mark.parametrize(('clients', 'requests'), [(1, 150), (60, 3)])
def test_answers_that_nobody_takes(tmp_path, clients, requests):
    """Large answers to clients that do not read do not fill the memory."""
    target = '/docs/swagger-ui-bundle.js'  # 1.6 MiB
    with Server(tmp_path) as server, ExitStack() as opened:
        server.ask(request('GET', target))
        before = server.memory()
        for _ in range(clients):
            client = opened.enter_context(server.connect())
            client.send(request('GET', target) * requests)
            assert client.is_readable(PROMPT)
        assert_prompt(server)
        assert server.memory() < before + 20


def test_short_keepalive(tmp_path):
    """A new connection has its time for a first request, also if none is kept."""
    with Server(tmp_path, '--keep-alive=0') as server, server.connect() as client:
        time.sleep(1.5)  # the worker looks every second
        assert client.ask(probing()).status == 200


OTHER_APP = """
from pathlib import Path

def app(environ, start_response):
    size = Path(__file__).stat().st_size
    start_response('200 OK', [('Content-Length', str(size))])
    if environ['PATH_INFO'] == '/broken':
        return broken()
    return environ['wsgi.file_wrapper'](open(__file__, 'rb'))

def broken():
    yield b'begun'
    raise ValueError('broken')
"""


def test_another_application(tmp_path):
    """Whatever an application does with its answer, its worker goes on."""
    path = tmp_path / 'other.py'
    path.write_text(OTHER_APP)
    with Server(tmp_path, 'other:app', workers=None) as server:
        with server.connect() as kept:
            assert kept.ask(request('GET')).body == path.read_bytes()
            with pytest.raises(ConnectionError, match='after 5 of'):
                server.ask(request('GET', '/broken'))
            assert kept.ask(request('GET')).body == path.read_bytes()
        assert server.log.count('ValueError: broken') == 1
        assert server.log.count('Traceback') == 1


def run_loaded(program):
    """Run a program that finds the configuration loaded; return what it prints."""
    done = subprocess.run(
        [sys.executable, '-c', LOADED + program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert not done.stderr
    return done.stdout


def test_client_that_never_waits():
    """A client that has its next request already waits for the others all the same."""
    assert run_loaded(NEVER_WAITS) == 'True True\n'


EARLY_WAKEUP = """
def ask():
    print('called', scheduler.call(gate.wait))


gate = threading.Event()
asking = configuration.greenlet(ask, scheduler._loop)
asking.switch()
scheduler.resume(asking)
scheduler.turn()
print('still waiting', bool(asking))
gate.set()
while asking:
    scheduler.turn()
os._exit(not sys.stdout.flush())
"""


def test_wakeup_that_is_early():
    """A call returns when it was made, also if its caller is resumed before."""
    assert run_loaded(EARLY_WAKEUP) == 'still waiting True\ncalled True\n'


FAILING = f"""
import socket
import types
{WORKER}


def fail(conn):
    raise ValueError('unforeseen')


ours, theirs = socket.socketpair()
client = configuration.ClientSocket(scheduler, ours)
worker._clients = {{ours.fileno(): client}}
worker.nr_conns = 1
worker.handle = fail
worker.log = types.SimpleNamespace(exception=print)
scheduler.start(worker._serve, client, ('', 0), ('', 0))
print(worker.nr_conns, worker._clients, theirs.recv(1))
"""


def test_connection_that_fails():
    """Whatever goes wrong with a connection, its worker goes on without it."""
    assert run_loaded(FAILING) == "A connection was lost\n0 {} b''\n"


LATE_WAKEUP = """
write = os.eventfd_write
turned = threading.Event()


def write_late(*args):
    turned.wait()
    write(*args)


def ask():
    print('called', scheduler.call(lambda: 'in a thread'))


os.eventfd_write = write_late
scheduler.start(ask)
while not scheduler.turn():
    if scheduler._woken_up:
        break
scheduler.turn()
turned.set()
poll = select.poll()
poll.register(scheduler.wakeup_fd, select.POLLIN)
poll.poll(5000)
for _ in range(3):
    if poll.poll(0):
        scheduler.on_wakeup()
    scheduler.turn()
print('quiet', not poll.poll(0), flush=True)
os._exit(0)
"""


FEW_THREADS = """
start = threading.Thread.start
room = 0


def start_if_there_is_room(thread):
    global room
    if not room:
        raise RuntimeError("can't start new thread")
    room -= 1
    start(thread)


def ask(word):
    try:
        print(scheduler.call(lambda: word), flush=True)
    except RuntimeError as ex:
        print(word, 'failed:', ex, flush=True)


def answer():
    poll = select.poll()
    poll.register(scheduler.wakeup_fd, select.POLLIN)
    while scheduler._called:
        poll.poll(5000)
        scheduler.on_wakeup()
        scheduler.turn()


threading.Thread.start = start_if_there_is_room
for _ in range(configuration.MOST_THREADS):
    scheduler.start(ask, 'refused')
room = 1
for word in ('one', 'two'):
    scheduler.start(ask, word)
answer()
os._exit(0)
"""


def test_threads_that_do_not_start():
    """Calls fail while there is no room for any thread, and not when there is one."""
    *refused, one, two = run_loaded(FEW_THREADS).splitlines()
    assert len(refused) == 16
    assert set(refused) == {"refused failed: can't start new thread"}
    assert (one, two) == ('one', 'two')


def test_wakeup_that_is_late():
    """A thread that wakes the loop late, after its call was taken up, does so once."""
    assert run_loaded(LATE_WAKEUP) == 'called in a thread\nquiet True\n'
