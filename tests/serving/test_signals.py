"""Signals that end, replace, add and remove workers, under load and without."""

import os
import re
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from exchange import Load, assert_error, fern, table
from machine import locked, upgraded
from server import GUNICORN, SCRIPTS, Server, is_alive, request
from waiting import PATIENCE, wait_until

PROBE = request('GET', '/livez')


def assert_clean_end(server, seconds):
    """Check that the server and its workers end in time, and log no error."""
    workers = server.worker_pids()
    assert server.wait(seconds) == 0
    assert not [pid for pid in workers if is_alive(pid)]
    assert 'Traceback' not in server.log
    assert 'ERROR' not in server.log


@pytest.mark.parametrize('times', [1, 2_000, 0])
def test_interrupt_ends_all_at_once(tmp_path, times):
    """Ctrl-C, once or often, or SIGQUIT ends the server whatever its clients do."""
    # Silent, idle, two kinds of incomplete requests, and an add that waits.
    sent = (b'', PROBE, PROBE[:20], request(body=b'{"id"', content_length='100'))
    sent += (request(body=fern()),)
    with Server(tmp_path, workers=2) as server, ExitStack() as opened:
        assert server.ask(request(body=fern())).status == 200
        opened.enter_context(locked(tmp_path / 'plants.jsonl'))
        for data in 2 * sent:
            opened.enter_context(server.connect()).send(data)
        assert server.ask(PROBE).status == 200
        for _ in range(times):
            server.interrupt()
        if times:
            assert_clean_end(server, seconds=3)
        else:  # SIGQUIT to the master alone: the add is 503, and this is logged
            server.signal(signal.SIGQUIT)
            assert server.wait(10) == 0


def assert_all_stored(server, load):
    """Check that each plant answered with 200 is stored once, with no error logged."""
    stored = Counter(plant['id'] for plant in server.plants())
    assert set(stored.values()) == {1}
    assert {plant['id'] for plant in load.added} <= stored.keys()
    assert 'Traceback' not in server.log
    assert 'ERROR' not in server.log


def reload(server, load):
    """Send SIGHUP."""
    server.reload()
    load.wait_for_all()
    assert len(server.worker_pids()) == 2


def scale(server, load):
    """Send SIGTTIN up to four workers, and SIGTTOU down to one."""
    signals = 2 * [signal.SIGTTIN] + 3 * [signal.SIGTTOU]
    for number, workers in zip(signals, (3, 4, 3, 2, 1), strict=True):
        server.signal(number)
        wait_until(lambda n=workers: len(server.worker_pids()) == n, f'{workers} run')
        load.wait_for_all()


def recycle(server, load):
    """Wait until --max-requests has replaced every worker several times."""
    wait_until(lambda: server.log.count('Booting worker') > 6, 'they are replaced')


OPERATIONS = {
    'SIGHUP': (reload, []),
    'SIGTTIN and SIGTTOU': (scale, []),
    'max_requests': (recycle, ['--max-requests=50', '--max-requests-jitter=20']),
}


@table('operate, arguments', OPERATIONS)
def test_no_request_fails_while_workers_are_replaced(tmp_path, operate, arguments):
    """While workers start and end, every request on every connection is answered."""
    with Server(tmp_path, *arguments, workers=2) as server:
        with Load(server) as load:
            load.wait_for_all()
            operate(server, load)
        assert not load.failed
        assert_all_stored(server, load)
        assert len(server.plants()) == len(load.added)


def test_upgrade_loses_no_request(tmp_path):
    """SIGUSR2, then SIGTERM to the old master: every request is answered."""
    command = (SCRIPTS / 'gunicorn', *GUNICORN[3:])
    with Server(tmp_path, command=command, workers=2) as server:
        load = Load(server)
        with upgraded(server):
            with load:
                load.wait_for_all()
                server.signal(signal.SIGTERM)
                assert server.wait() == 0
                load.wait_for_all()
            assert not load.failed
            assert_all_stored(server, load)
            assert len(server.plants()) == len(load.added)


@pytest.mark.parametrize('end', ['SIGTERM', 'Ctrl-C'])
def test_server_that_ends_under_load_has_each_plant(tmp_path, end):
    """A server ends in time under load, and every plant answered with 200 is stored."""
    with Server(tmp_path, workers=2) as server:
        with Load(server) as load:
            load.wait_for_all()
            if end == 'SIGTERM':
                server.signal(signal.SIGTERM)
            else:
                server.interrupt()
            assert_clean_end(server, seconds=5)
        # A connection that no worker had accepted is cut off unread: nothing is stored.
        assert_all_stored(server, load)
        if end == 'SIGTERM':
            assert len(server.plants()) == len(load.added)
            # The last worker has closed the store, so the next open reads no plant.
            assert not (tmp_path / 'plants.jsonl.index-wal').exists()


def test_reload_ends_idle_connections(tmp_path):
    """After a reload a silent connection is closed before its limit is reached."""
    with Server(tmp_path, '--keep-alive=60') as server, server.connect() as client:
        assert client.ask(PROBE).status == 200
        server.signal(signal.SIGHUP)
        assert client.is_readable(PATIENCE / 4)
        assert client.receive() is None


def test_old_worker_ends_with_its_time_to_stop(tmp_path):
    """A request that does not end keeps a worker for a limited time after a reload."""
    lines = ['client.REQUEST_TIMEOUT = 3600', 'graceful_timeout = 1']
    with Server(tmp_path, conf=lines) as server, server.connect() as client:
        old = server.worker_pids()
        assert client.ask(PROBE).status == 200
        client.send(PROBE[:20])
        server.signal(signal.SIGHUP)
        wait_until(lambda: not old & server.worker_pids(), 'it ends')


def test_last_request_of_a_worker_announces_its_end(tmp_path):
    """A worker answers as many requests as --max-requests says, and the last so."""
    # Its first one was that of ``Server``, which waits until it serves.
    with Server(tmp_path, '--max-requests=4') as server, server.connect() as client:
        announced = [client.ask(PROBE).announces_close for _ in range(3)]
        assert announced == [False, False, True]


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGQUIT])
def test_worker_that_is_starting_stops_at_once(tmp_path, number):
    """A worker that has no signal handlers yet stops at once with the server."""
    lines = 'import time', 'post_fork = lambda server, worker: time.sleep(3600)'
    with Server(tmp_path, conf=lines).started() as server:
        wait_until(lambda: 'Booting worker' in server.log, 'the worker is forked')
        server.signal(number)
        assert server.wait(PATIENCE / 4) == 0


def test_reload_during_an_upgrade_is_refused(tmp_path):
    """While two masters run, neither reloads; the printed token survives it all."""
    with Server(tmp_path, workers=2, PLANTS_TOKENS=None) as server:
        [path] = re.findall(r'PLANTS_TOKENS=\$\(cat (.*)\)', server.log)
        token = Path(path).read_text()
        Path(path).unlink()
        data = request(body=fern(), authorization=f'Bearer {token}')
        with upgraded(server) as new:
            for master in (server.pid, new):
                os.kill(master, signal.SIGHUP)
            refused = 'Not reloaded, the server goes on as before: two masters'
            wait_until(lambda: server.log.count(refused) == 2, 'both refuse')
            assert server.ask(data).status == 200
        wait_until(lambda: len(server.worker_pids()) == 2, 'its workers end, too')
        server.reload()
        assert server.ask(data).status == 200
        with upgraded(server):
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            assert server.ask(data).status == 200
            assert_error(server.ask(request(body=fern())), 40101)
        assert server.log.count('No token is configured') == 1


def test_no_signal_is_lost_however_quickly_they_come(tmp_path):
    """Signals during a reload are heard, and the server goes on."""
    with Server(tmp_path) as server:
        for number, pause in enumerate((0.001, 0.5), 1):
            old = server.worker_pids()
            reloads = server.log.count('Reloaded')
            heard = server.log.count('signal: hup')
            server.signal(signal.SIGHUP)
            # Two signals of a kind are one until the process has heard the first.
            wait_until(lambda n=heard: server.log.count('signal: hup') > n, 'heard')
            for other in (signal.SIGUSR1, signal.SIGTTIN, signal.SIGHUP):
                time.sleep(pause)
                server.signal(other)
            wait_until(lambda n=reloads: server.log.count('Reloaded') == n + 2, 'twice')
            wait_until(lambda old=old: not old & server.worker_pids(), 'all are new')
            wait_until(lambda: len(server.worker_pids()) == 1, 'there are no more')
            for name in ('usr1', 'ttin'):
                assert server.log.count(f'Handling signal: {name}') == number
            assert server.ask(request(body=fern())).status == 200
        assert 'ERROR' not in server.log


@pytest.mark.parametrize('pause', [0.001, 0.1, 0.5])
def test_server_ends_in_the_middle_of_a_reload(tmp_path, pause):
    """SIGTERM ends the server, whatever a reload is doing, or many at once."""
    with Server(tmp_path) as server:
        for _ in range(500):
            server.signal(signal.SIGHUP)
        time.sleep(pause)
        server.signal(signal.SIGTERM)
        assert_clean_end(server, seconds=10)
