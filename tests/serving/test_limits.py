"""Slow clients are ended at their time limits; no other client waits for them."""

import re
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from exchange import LARGE_FILE, assert_error, assert_quick, chunked, fern, receive_last
from machine import count_sockets, locked, only_worker, paused
from server import PATIENCE, Server, request, wait_until

NO_TOKEN = request(body=b'a' * 70_000, authorization=None)
PROBE = request('GET', '/livez')
SLOW_HEAD = b'POST /plants HTTP/1.1\r\nX-Slow: '
SLOW_BODY = request(body=b' ', content_length='1000')
INCOMPLETE = {
    'empty line': (b'', b'\r\n', None),
    'head': (b'', SLOW_HEAD, None),
    'body': (b'', SLOW_BODY, 40000),
    'chunk': (b'', chunked(b' ', end=b'100\r\n'), 40000),
    'trailers': (b'', chunked(b' ', end=b'0\r\nX: '), 40000),
    'head behind another request': (PROBE, request()[:40], None),
    'body behind another request': (PROBE, SLOW_BODY, 40000),
}


def test_incomplete_request_is_ended_at_its_time_limit(impatient, subtests):
    """An incomplete request is ended at its time limit, also behind another request."""
    with ExitStack() as opened:
        clients = {}
        for name, (before, data, _) in INCOMPLETE.items():
            clients[name] = opened.enter_context(impatient.connect())
            clients[name].send(before + data)
            if before:
                assert clients[name].receive().status == 200

        def ended():
            waiting = [name for name in clients if not clients[name].is_readable(0.01)]
            for name in waiting:
                if not INCOMPLETE[name][0]:  # the time runs also without more bytes
                    clients[name].send(b' ')
            return not waiting

        wait_until(ended, 'the requests are ended')
        for name, (_, _, value) in INCOMPLETE.items():
            with subtests.test(name):
                if name == 'empty line':  # a space does not begin a request
                    assert_error(receive_last(clients[name]), 40000)
                elif value is None:
                    assert clients[name].receive() is None
                else:
                    assert_error(receive_last(clients[name]), value)


def test_each_request_of_a_connection_has_its_own_time_limit(impatient):
    """The time limit of a request begins with that request."""
    with impatient.connect() as client:
        for _ in range(3):
            time.sleep(0.7)
            assert client.ask(PROBE).status == 200


@pytest.mark.parametrize(('requests', 'idle'), [(0, 0), (1, 1)])
def test_idle_connection_is_closed_at_its_time_limit(tmp_path, requests, idle):
    """A connection is closed at its idle limit; a new one has a limit of its own."""
    lines = ['connection.REQUEST_TIMEOUT = 3600', 'connection.FIRST_REQUEST = 1']
    with Server(tmp_path, f'--keep-alive={idle}', conf=lines) as server:
        began = time.monotonic()
        with server.connect() as client:
            for _ in range(requests):
                assert client.ask(PROBE).status == 200
            assert client.receive() is None
            assert time.monotonic() - began > 0.9
        assert server.ask(PROBE).announces_close == (idle == 0)


def test_wait_for_the_store_is_no_time_of_the_client(impatient):
    """If the store takes longer than a request may, the client is answered."""
    plants = impatient.directory / 'plants.jsonl'
    assert impatient.ask(request(body=fern())).status == 200
    with impatient.connect() as client:
        with locked(plants):
            client.send(request(body=fern(), x_request_id='slow'))
            assert not client.is_readable(1.5)
        assert client.receive().status == 200
        assert client.ask(request(body=fern())).status == 200
    line = r'slow token-1 .* [0-9]{4,}\.[0-9] ms'
    wait_until(lambda: re.search(line, impatient.log), 'its time is logged')


def test_request_sent_to_a_paused_worker_is_answered(tmp_path):
    """A worker that is paused for longer than its limits first hears its clients."""
    with Server(tmp_path, '--keep-alive=1') as server, server.connect() as client:
        assert client.ask(PROBE).status == 200
        with paused(server):
            client.send(request(body=fern()))
            assert not client.is_readable(1.5)
        assert client.receive().status == 200


def test_slow_reader_gets_everything(impatient):
    """A client that reads a piece at a time gets it all, also after the time limit."""
    whole = impatient.ask(request('GET', LARGE_FILE)).body
    with impatient.connect() as client:
        client.send(request('GET', LARGE_FILE) * 3)
        received = b''
        while len(received) < 3 * len(whole):
            piece = client._socket.recv(2**19)
            assert piece, 'closed'  # or it would be asked forever
            received += piece
            time.sleep(0.15)
        assert received.count(whole) == 3


def test_client_that_sends_its_last_byte_early_is_answered(service, connection):
    """A client may end its side of the connection behind its requests."""
    connection.send(PROBE + request(body=fern()) * 2)
    connection.finish_sending()
    assert [connection.receive().status for _ in range(3)] == [200] * 3
    assert connection.receive() is None


def test_connections_above_the_file_limit_wait(tmp_path):
    """A worker opens as many files as the hard limit permits, and survives more."""
    limits = 'resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))'
    with Server(tmp_path, conf=['import resource', limits]) as server:
        pid = only_worker(server)
        with ExitStack() as connections:
            for _ in range(100):
                client = connections.enter_context(server.connect())
                client.send(SLOW_HEAD)
            open_files = Path(f'/proc/{pid}/fd')
            wait_until(lambda: len(list(open_files.iterdir())) >= 60, 'all are open')
            assert not client.is_readable(0.3)
        assert server.ask(request(body=fern())).status == 200
        assert only_worker(server) == pid
        assert 'Traceback' not in server.log


# What a client sends, on so many connections, and whether it then leaves.
ABANDONED = {
    # More than the kernel buffers at both ends, which is up to 36 MiB.
    'reads one answer of many': (5, request('GET', LARGE_FILE) * 40, False),
    'leaves in the middle': (20, request('GET', LARGE_FILE) * 3, True),
    'stays after a close': (8, request(body=fern(), connection='close'), False),
    'stays after empty lines': (8, b'\r\n\r\n\r\n', False),
    'stays after a refused body': (8, NO_TOKEN, False),
}


def test_abandoned_connection_is_closed(impatient):
    """No socket is left of clients that leave, read no more, or ignore a close."""
    before = count_sockets(impatient)
    with ExitStack() as opened:
        for number, data, leaves in ABANDONED.values():
            for _ in range(number):
                client = opened.enter_context(impatient.connect())
                client.send(data)
                if leaves:
                    assert client.is_readable(PATIENCE)
                    client.close()
                else:
                    assert client.receive().announces_close == (
                        LARGE_FILE.encode() not in data
                    )
        assert_quick(impatient)
        wait_until(lambda: count_sockets(impatient) <= before, 'they are closed')
    assert 'ERROR' not in impatient.log


RESETS = [b'', SLOW_HEAD, SLOW_BODY, request(body=fern()), NO_TOKEN, PROBE * 50]


def test_reset_at_any_moment_ends_only_its_connection(impatient):
    """A client may reset its connection at any moment; nothing is left of it."""
    before = count_sockets(impatient)
    for number in range(40):
        for data in RESETS:
            with impatient.connect() as client:
                linger = struct.pack('ii', 1, 0)
                client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                client.send(data)
                client.is_readable(number / 10_000)
    assert_quick(impatient)
    wait_until(lambda: count_sockets(impatient) <= before, 'they are closed')
    assert 'Traceback' not in impatient.log
