"""The master: what fails beside it, or interrupts it, ends no worker that is well."""

import os
import re
import signal
import time

import pytest
from exchange import fern
from machine import edit, paused
from rawclient import request
from server import Server, time_limits, wait_until
from test_reload import refusal
from test_workers import stop

# Heartbeats and forks, or new workers, fail while there is a file, after its seconds.
FAILING = """
import tempfile, time
fork, mkstemp = os.fork, tempfile.mkstemp
def check(name):
    if os.path.exists(name):
        time.sleep(float(open(name).read() or 0))
        raise BlockingIOError('no room')
os.fork = lambda: check('no fork') or fork()
tempfile.mkstemp = lambda **how: check('no fork') or mkstemp(**how)
def post_fork(server, worker):
    print('umask', os.umask(0o77), flush=True)
    check('no boot')
"""


@pytest.mark.parametrize('name', ['no fork', 'no boot'])
def test_workers_go_on_where_none_can_start(tmp_path, name):
    """After a death, at SIGTTIN and SIGHUP; later it is tried again."""
    fault = tmp_path / name
    with Server(tmp_path, conf=[FAILING], workers=2) as server:
        before, began = server.worker_pids(), time.monotonic()
        fault.touch()
        os.kill(min(before), signal.SIGKILL)
        server.signal(signal.SIGTTIN)
        tries = re.compile('cannot start|exited with code').findall
        wait_until(lambda: len(tries(server.log)) > 10, 'it is tried again')
        # Twice a second, two workers.
        assert len(tries(server.log)) <= 4 * (time.monotonic() - began) + 5
        if name == 'no fork':
            server.signal(signal.SIGUSR2)
            wait_until(lambda: 'SIGUSR2: no new' in server.log)
            assert 'no room' in refusal(server)
        else:
            fault.write_text('1')
            server.signal(signal.SIGHUP)
            seen = len(server.log)
            wait_until(lambda: server.log.count('no room', seen) > 3, 'tried again')
        assert server.worker_pids() & before
        assert server.ask(request(body=fern())).status == 200
        os.kill(max(before), signal.SIGKILL)
        time.sleep(1)
        assert 'reloaded:' not in server.log
        fault.unlink()
        server.reload()
        wait_until(lambda: 'reloaded:' in server.log)
        assert server.ask(request(body=fern())).status == 200
        assert 'umask 0\n' not in server.log


def test_hook_that_fails_ends_no_worker(tmp_path):
    """A hook of the operator, at the end of a worker, at SIGTTIN, after a reload."""
    own = 'pre_fork = lambda server, worker: None'  # until the reload
    hooks = [own, 'child_exit = lambda server, worker: 1 / 0']
    hooks += ['nworkers_changed = lambda server, new, old: old and 1 / 0']
    with Server(tmp_path, conf=hooks, workers=2) as server:
        before = server.worker_pids()
        with paused(server.pid):  # it hears of both at once
            for worker in before:
                os.kill(worker, signal.SIGKILL)
        wait_until(lambda: len(server.worker_pids() - before) == 2)
        edit(tmp_path / 'more.conf.py', own, '')
        server.reload()
        server.signal(signal.SIGTTIN)
        wait_until(lambda: len(server.worker_pids()) == 3 and 'reloaded' in server.log)
        assert {'child_exit', 'nworkers_changed'} <= set(re.findall(r'\w+', server.log))
        assert server.ask(request(body=fern())).status == 200


# A reload that takes for ever, as one of a large file may seem to.
SLOW = ['while Path("slow").exists():', '    Path("reading").touch()']


def test_stop_interrupts_a_reload(tmp_path):
    """Also while other signals wait."""
    with Server(tmp_path, conf=SLOW, workers=2) as server:
        (tmp_path / 'slow').touch()
        server.signal(signal.SIGHUP)
        wait_until((tmp_path / 'reading').exists)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
            server.signal(number)
        assert server.wait(20) == 0
        assert 'Traceback' not in server.log


def test_stop_is_heard_while_old_workers_end(tmp_path):
    """Their silent clients go first; a request may delay them, and no other signal."""
    conf = [*time_limits(REQUEST_TIMEOUT=3600, LINGER=0.2), 'keepalive = 3600']
    with (
        Server(tmp_path, conf=conf) as server,
        server.connect() as silent,
        server.connect() as unfinished,
    ):
        for client in (silent, unfinished):
            assert client.ask(request('GET', '/livez')).status == 200
        unfinished.send(request(body=fern())[:-1])
        for _ in range(10):
            server.signal(signal.SIGHUP)
        wait_until(lambda: 'reloaded' in server.log)
        assert silent.receive() is None
        stop(server)
        unfinished.send(b'}')
        assert unfinished.receive().status == 200
        assert server.wait(20) == 0
        assert server.log.count('reloaded') < 5


def test_pause_of_all_ends_no_worker(tmp_path):
    """The master waits a tick, as after the sleep of a laptop; then it looks again."""
    with Server(tmp_path, '--timeout=2', workers=2) as server:
        os.killpg(server.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.killpg(server.pid, signal.SIGCONT)
        time.sleep(2)  # it has looked again
        assert 'TIMEOUT' not in server.log
        os.kill(min(server.worker_pids()), signal.SIGSTOP)
        wait_until(lambda: 'TIMEOUT' in server.log)
