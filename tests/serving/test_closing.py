"""The end of a connection: answers announce it, and no client loses its last one."""

import json
import time
from contextlib import ExitStack

from exchange import (
    MAX_ANSWER_SECONDS,
    assert_error,
    chunked,
    fern,
    receive_last,
    table,
)
from machine import locked, stop
from server import Server, request, wait_until

ENDLESS = {
    'length': (request(body=b' ', content_length=str(10**12)), b' ' * 65_536),
    'chunks': (
        request(content_type='application/json', transfer_encoding='chunked'),
        b'10000\r\n' + b' ' * 65_536 + b'\r\n',
    ),
}


def is_cut_off(client, data):
    """Send something; return whether the server has ended the connection."""
    try:
        client._socket.sendall(data)
    except ConnectionError:
        return True


@table('head, piece', ENDLESS)
def test_endless_body_is_refused_at_once_and_cut_off(impatient, head, piece):
    """An endless body is refused at the limit, and cut off in time."""
    with impatient.connect() as client:
        client.send(head + piece + piece)
        assert client.is_readable(MAX_ANSWER_SECONDS)
        answer = client.receive()
        assert_error(answer, 40003)
        assert answer.announces_close
        wait_until(lambda: is_cut_off(client, piece), 'it is cut off')


def test_refused_body_is_read_away_while_it_comes_quickly(tmp_path):
    """A client that sends less than LINGER_RATE is cut off, one that sends more not."""
    lines = ['client.REQUEST_TIMEOUT = 3600', 'client.LINGER = 0.5']
    refused = request(content_length=10**12, authorization=None)
    with Server(tmp_path, conf=lines) as server, server.connect() as quick:
        assert quick.ask(refused).announces_close
        for _ in range(15):  # 1.3 MB/s
            quick._socket.sendall(bytes(2**17))
            time.sleep(0.1)
        with server.connect() as slow:
            assert slow.ask(refused).announces_close
            piece = bytes(2**10)  # at most 0.1 MB/s
            wait_until(lambda: time.sleep(0.01) or is_cut_off(slow, piece), 'it ends')


def test_request_that_has_begun_as_the_server_stops_is_answered(tmp_path):
    """A stop in a pipeline, or while a body is read: one more answer, with the end."""
    plants = [fern(), fern(), fern()]
    bodies = [json.dumps(plant).encode() for plant in plants]
    how = {'expect': '100-continue', 'content_type': 'application/json'}
    sent = [b''.join(request(body=plant) for plant in (plants[0], fern(), fern()))]
    sent += [request(body=bodies[1], **how), chunked(bodies[2], **how)]
    with Server(tmp_path) as server, ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in sent]
        with locked(tmp_path / 'plants.jsonl'):
            for client, data in zip(clients, sent, strict=True):
                client.send(data[:-10])
            for client in clients[1:]:
                assert client.receive().status == 100
            stop(server)
        for client, data in zip(clients, sent, strict=True):
            client.send(data[-10:])
            assert receive_last(client).status == 200
        assert server.wait() == 0
        assert server.plants() == plants
