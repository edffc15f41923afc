"""Requests that wait for the store: they do not block the worker's event loop."""

import random
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from exchange import MAX_ANSWER_SECONDS, SHORT_DATABASE_LIMITS, table
from machine import locked, paused
from proxy import Proxy
from server import REPOSITORY, Server, request, wait_until

CROWD = 40  # requests; more than the worker's pool has threads
READY = request('GET', '/readyz')


def send_crowd(server, opened):
    """Send 40 adds and 40 probes; return the clients."""
    clients = [opened.enter_context(server.connect()) for _ in range(2 * CROWD)]
    for id, client in enumerate(clients):
        client.send(add_request(id) if id % 2 else READY)
    return clients


def add_request(id):
    """Return a request that adds a plant."""
    return request(body={'id': id, 'name': 'Fern'})


def assert_prompt(server):
    """Check that requests which need no store are answered quickly."""
    for _ in range(5):
        began = time.monotonic()
        assert server.ask(request('GET', '/livez')).status == 200
        assert server.ask(request(authorization=None)).status == 401
        assert time.monotonic() - began < MAX_ANSWER_SECONDS


def test_locked_file_delays_only_requests_to_the_store(tmp_path):
    """While another process has the lock, requests without the store are answered."""
    with ExitStack() as opened, Server(tmp_path) as server:
        assert server.ask(add_request(-1)).status == 200
        with locked(tmp_path / 'plants.jsonl'):
            clients = send_crowd(server, opened)
            assert_prompt(server)
            assert not any(client.is_readable() for client in clients)
        assert [client.receive().status for client in clients] == [200] * len(clients)
        assert len(server.lines()) == CROWD + 1


def test_requests_are_served_in_the_order_of_their_arrival(tmp_path):
    """Requests that wait together are served in the order in which they came."""
    with ExitStack() as opened, Server(tmp_path) as server:
        clients = [opened.enter_context(server.connect()) for _ in range(CROWD)]
        for client in clients:
            assert client.ask(request('GET', '/livez')).status == 200
        random.shuffle(clients)
        # epoll reports the sockets of its latest report first: make another report.
        assert server.ask(request('GET', '/livez')).status == 200
        with paused(server):
            for id, client in enumerate(clients):
                client.send(add_request(id))
        assert {client.receive().status for client in clients} == {200}
        assert [plant['id'] for plant in server.plants()] == list(range(CROWD))


def test_clients_that_pipeline_take_turns(tmp_path):
    """Of two clients that pipeline, each is answered after the other one."""
    with Server(tmp_path) as server, server.connect() as one, server.connect() as two:
        assert one.ask(request('GET', '/livez')).status == 200
        assert two.ask(request('GET', '/livez')).status == 200
        with paused(server):
            for client, id in ((one, 'id-one'), (two, 'id-two')):
                client.send(CROWD * request(authorization=None, x_request_id=id))
        for _ in range(CROWD):
            assert one.receive().status == two.receive().status == 401
        wait_until(lambda: server.log.count('id-') == 2 * CROWD, 'all are in the log')
        order = re.findall('id-(one|two)', server.log)
        assert all(map(str.__ne__, order[::2], order[1::2]))


def test_hanging_database_delays_only_requests_to_the_store(tmp_path, url):
    """While the database hangs, other requests are answered, and adds end with 503."""
    with (
        ExitStack() as opened,
        Proxy(urlsplit(url).port) as proxy,
        Server(
            tmp_path, conf=SHORT_DATABASE_LIMITS, PLANTS_STORE=proxy.url(url)
        ) as server,
    ):
        # A database that takes longer than a second is away, also on a busy machine.
        wait_until(lambda: server.ask(add_request(-1)).status == 200, 'it adds')
        proxy.stop()
        clients = send_crowd(server, opened)
        assert_prompt(server)
        assert {client.receive().status for client in clients} == {503}
        proxy.go_on()
        wait_until(lambda: server.ask(READY).status == 200, 'it is ready')
        wait_until(lambda: server.ask(add_request(1)).status == 200, 'it adds again')


PATCHED = """
from gevent import monkey
monkey.patch_all()
import gevent
from serving.scheduler import GeventScheduler

sleep = monkey.get_original('time', 'sleep')
call = gevent.spawn(GeventScheduler().call, lambda: sleep(0.5))
gevent.sleep(0.01)
assert not call.ready()
call.get()
"""


LEAVES_ITS_TURN = """
import gevent
from serving.scheduler import Turns

turns, reached = Turns(), []

def wait():
    try:
        turns.wait_for_others(is_next=True)
    except SystemExit:
        gevent.sleep(0.2)
        reached.append('the end')

leaving = gevent.spawn(wait)
gevent.sleep(0)
gevent.get_hub().loop.run_callback(leaving.throw, SystemExit)
leaving.join()
assert reached, leaving.exception
"""


CONNECTED = """
import gevent, socket
from serving.client import BODY, HEAD, SLICE, Client
from serving.scheduler import Turns

listener = socket.create_server(('127.0.0.1', 0))
peer = socket.create_connection(listener.getsockname())
sock = listener.accept()[0]
sock.setblocking(False)
client = Client(sock, Turns())
"""
ARRIVES_AT_THE_LIMIT = f"""{CONNECTED}
client.begin(HEAD)
waiting = gevent.spawn(client.recv, 100)
gevent.sleep(0.01)
peer.sendall(b'first')
client.expire()
assert waiting.get() == b'first'
assert client.has_ended
peer.sendall(b'second')
assert client.recv(100) == b''
"""
SENDS_MUCH = f"""{CONNECTED}
peer.sendall(bytes(SLICE + 8192))
client.begin(BODY)
reading = gevent.spawn(lambda: [client.recv(4096) for _ in range(18)])
assert gevent.spawn(reading.ready).get() is False
"""
PROGRAMS = {
    'a call blocks no greenlet of a patched program': PATCHED,
    'a greenlet that left its turn is woken in no later wait': LEAVES_ITS_TURN,
    'data that arrives at a time limit takes no limit back': ARRIVES_AT_THE_LIMIT,
    'others go on before all that a client has sent is read': SENDS_MUCH,
}


@table('program', PROGRAMS)
def test_greenlets_wait_for_what_they_should(program):
    """A call, an interrupt or late data disturbs no wait but its own."""
    subprocess.run([sys.executable, '-c', program], cwd=REPOSITORY, check=True)
