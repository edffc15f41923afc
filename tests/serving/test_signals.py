"""Signals that end, replace, add and remove workers, under load and without."""

import os
import re
import signal
import time
from contextlib import ExitStack

import pytest
from exchange import Load, fern, table
from machine import locked, upgraded
from server import GUNICORN, SCRIPTS, Server, is_alive, request, wait_until
from waiting import PATIENCE

PROBE = request('GET', '/livez')


def assert_clean_end(server, seconds):
    """Check that the server and its workers end in time, and log no error."""
    workers = server.worker_pids()
    assert server.wait(seconds) == 0
    assert not [pid for pid in workers if is_alive(pid)]
    for word in ('Traceback', 'ERROR', 'store is closed'):
        assert word not in server.log


@pytest.mark.parametrize('end', ['interrupt', 'often', 'SIGQUIT'])
def test_interrupt_ends_all_at_once(tmp_path, end):
    """Ctrl-C, once or often, or SIGQUIT ends the server whatever its clients do."""
    # Silent, idle, two kinds of incomplete requests, and an add that waits.
    sent = (b'', PROBE, PROBE[:20], request(body=b'{"id"', content_length='100'))
    sent += (request(body=fern()),)
    with Server(tmp_path, '-p', 'pid', workers=2) as server, ExitStack() as opened:
        assert server.ask(request(body=fern())).status == 200
        opened.enter_context(locked(tmp_path / 'plants.jsonl'))
        for data in 2 * sent:
            opened.enter_context(server.connect()).send(data)
        assert server.ask(PROBE).status == 200
        for _ in range({'interrupt': 1, 'often': 2_000, 'SIGQUIT': 0}[end]):
            server.interrupt()
        if end == 'SIGQUIT':
            server.signal(signal.SIGQUIT)
        assert server.wait(10) == 0
        assert 'Traceback' not in server.log
        assert not (tmp_path / 'pid').exists()


def assert_all_stored(server, load):
    """Check that each plant answered with 200 is stored, once."""
    stored = [plant['id'] for plant in server.plants()]
    assert len(stored) == len(set(stored))
    assert {plant['id'] for plant in load.added} <= set(stored)


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
        assert 'ERROR' not in server.log


@pytest.mark.parametrize('program', ['gunicorn', 'python -m gunicorn'])
def test_upgrade_loses_no_request(tmp_path, program):
    """SIGUSR2, then a signal to the old master: every request is answered."""
    command = (SCRIPTS / 'gunicorn', *GUNICORN[3:])
    command = command if program == 'gunicorn' else GUNICORN
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


@pytest.mark.parametrize('end', ['SIGTERM', 'SIGQUIT', 'Ctrl-C', 'master killed'])
def test_server_that_ends_under_load_answers_or_closes(tmp_path, end):
    """Each client has its answer or a closed connection, never 503; 200 is stored."""
    with Server(tmp_path, workers=2) as server:
        with Load(server) as load:  # it asserts that each status is 200
            load.wait_for_all()
            workers = server.worker_pids()
            if end == 'Ctrl-C':
                server.interrupt()
            else:
                kill = signal.SIGKILL if end == 'master killed' else signal.SIGTERM
                server.signal(signal.SIGQUIT if end == 'SIGQUIT' else kill)
            if end == 'master killed':
                wait_until(lambda: not any(map(is_alive, workers)), 'workers end', 20)
            else:
                assert_clean_end(server, seconds=10)
        assert_all_stored(server, load)


def test_reload_ends_idle_connections(tmp_path):
    """After a reload a silent connection is closed before its limit is reached."""
    with Server(tmp_path, '--keep-alive=60') as server, server.connect() as client:
        assert client.ask(PROBE).status == 200
        server.signal(signal.SIGHUP)
        assert client.is_readable(PATIENCE / 4)
        assert client.receive() is None


def test_old_worker_ends_with_its_time_to_stop(tmp_path):
    """A request that does not end keeps a worker for a limited time after a reload."""
    lines = ['connection.REQUEST_TIMEOUT = 3600', 'graceful_timeout = 1']
    with Server(tmp_path, conf=lines) as server, server.connect() as client:
        old = server.worker_pids()
        assert client.ask(PROBE).status == 200
        client.send(PROBE[:20])
        server.signal(signal.SIGHUP)
        wait_until(lambda: not old & server.worker_pids(), 'it ends')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGQUIT])
def test_worker_that_is_starting_stops_at_once(tmp_path, number):
    """A worker that has no signal handlers yet stops at once with the server."""
    lines = 'import time', 'post_fork = lambda server, worker: time.sleep(3600)'
    with Server(tmp_path, conf=lines).started() as server:
        wait_until(lambda: 'Booting worker' in server.log, 'the worker is forked')
        server.signal(number)
        assert server.wait(PATIENCE / 4) == 0


@pytest.mark.parametrize('pause', [0.001, 0.1, 0.5])
def test_server_ends_in_the_middle_of_a_reload(tmp_path, pause):
    """SIGTERM ends the server, whatever a reload is doing."""
    with Server(tmp_path) as server:
        for _ in range(3):
            server.signal(signal.SIGHUP)
        time.sleep(pause)
        server.signal(signal.SIGTERM)
        assert_clean_end(server, seconds=10)


def test_killed_worker_is_replaced(tmp_path):
    """A worker that the kernel kills, and what it had begun, harms no other."""
    with Server(tmp_path, workers=2) as server:
        victim = min(server.worker_pids())
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda: len(server.worker_pids() - {victim}) == 2, 'a new one starts'
        )
        assert server.ask(request(body=fern())).status == 200
        assert not re.search('CRITICAL|Traceback', server.log)
