"""Reloads (SIGHUP): they happen whole or not at all, and the process id stays."""

import os
import pty
import re
import signal

import pytest
from exchange import Load, assert_error, fern
from machine import edit, locked
from server import GUNICORN, Server, is_alive, request, wait_until

IN_PLACE = GUNICORN[:3]  # with the configuration of its directory


def replace_worker(server):
    """Kill a worker, and wait until there is another one."""
    old = server.worker_pids()
    os.kill(min(old), signal.SIGKILL)
    wait_until(lambda: len(server.worker_pids() - old) == 1, 'another one starts')


def test_reload_reads_settings_and_schemas(checkout):
    """New workers have the settings, schemas and worker class as they are now."""
    settings = checkout / 'gunicorn.conf.py'
    variable = "raw_env = ['PLANTS_MAX_BODY=10']\n"
    settings.write_text(settings.read_text() + variable)
    with Server(checkout, command=IN_PLACE) as server:
        pid = server.pid
        assert_error(server.ask(request(body=fern())), 40003)
        edit(settings, variable, "worker_class = 'gthread'\n")
        edit(checkout / 'schemas/Plant.json', '"examples": ["Fern"]', '"maxLength": 4')
        server.reload()
        assert server.ask(request(body=fern())).status == 200
        assert_error(server.ask(request(body=fern(name='Ferns'))), 40005)
        edit(settings, "worker_class = 'gthread'\n", '')
        server.reload()
        assert server.ask(request(body=fern())).status == 200
        assert server.pid == pid
        assert is_alive(pid)


# A line at the end of gunicorn.conf.py, and what the log then names.
REFUSED = {
    'syntax': ('keepalive =', 'gunicorn.conf.py'),
    'value': ("keepalive = 'long'", 'keepalive'),
    'exception': ('1 / 0', 'ZeroDivisionError'),
    'exit': ('raise SystemExit(3)', ''),
    'address': ("bind = '127.0.0.1:1'", 'bind'),
    'user': ('user = 1', 'user'),
    'pid file': ("pidfile = 'new.pid'", 'pidfile'),
    'setting of ours': ("raw_env = ['PLANTS_LOG=x']", 'PLANTS_LOG'),
    'store': ("raw_env = ['PLANTS_STORE=jsonl:no/plants']", 'no/plants'),
    'certificate': ("certfile = 'no.pem'", 'certfile'),
    'no token any more': ("raw_env = ['PLANTS_TOKENS=']", 'PLANTS_TOKENS'),
    'worker class': ("worker_class = 'no.Worker'", 'no.Worker'),
}


def refusal(server):
    """Reload, and return the line that says why that was refused."""
    before = len(server.log)
    server.signal(signal.SIGHUP)

    def found():
        return re.search('.*Not reloaded.*', server.log[before:])

    line = wait_until(found, 'it is refused', 20)[0]
    assert 'Traceback' not in server.log[before:]
    return line


def test_reload_that_would_fail_changes_nothing(checkout, subtests):
    """What new workers could not start with is refused, until it is corrected."""
    settings = checkout / 'gunicorn.conf.py'
    ours = f"{settings.read_text()}\nbind = '127.0.0.1:0'\n"
    settings.write_text(ours)
    with Server(checkout, command=IN_PLACE, GUNICORN_CMD_ARGS=None) as server:
        workers = server.worker_pids()
        for name, (line, words) in REFUSED.items():
            settings.write_text(f'{ours}{line}\n')
            with subtests.test(name):
                assert words in refusal(server)
                assert server.worker_pids() == workers
                assert server.ask(request(body=fern())).status == 200
        settings.write_text(ours)
        schema = checkout / 'schemas/Plant.json'
        sound = schema.read_text()
        schema.write_text('{"type": ["obj')
        assert 'Plant.json' in refusal(server)
        replace_worker(server)  # it serves what the others serve
        assert server.ask(request(body=fern())).status == 200
        schema.write_text(sound)
        server.reload()
        assert server.ask(request(body=fern())).status == 200


def test_reload_reads_a_replaced_plant_file(tmp_path):
    """A file in the place of the plant file is refused until a reload reads it."""
    plants, old = tmp_path / 'plants.jsonl', fern()

    def replace(data):
        (tmp_path / 'new').write_bytes(data)
        (tmp_path / 'new').rename(plants)
        wait_until(lambda: server.ask(request(body=fern())).status == 503, 'refused')

    with Server(tmp_path, workers=2) as server:
        assert server.ask(request(body=old)).status == 200
        replace(b'{"id":-7,"name":"Moss"}\n')
        server.reload()
        assert_error(server.ask(request(body=fern(id=-7))), 40006)
        assert server.ask(request(body=old)).status == 200
        replace(b'damage\n{"id":-7,"name":"Moss"}\n')
        assert 'line 1' in refusal(server)
        assert server.ask(request(body=fern())).status == 503


def test_five_reloads_fail_no_request(tmp_path):
    """Under load of kept and new connections; the process id stays."""
    with Server(tmp_path, workers=2) as server:
        with Load(server) as load:
            for _ in range(5):
                load.wait_for_all()
                server.reload()
            load.wait_for_all()
        assert not load.failed
        assert is_alive(server.pid)
        assert len(server.plants()) == len(load.added)
        for word in ('Traceback', 'ERROR', ' 503 '):
            assert word not in server.log


def test_master_does_not_wait_for_the_lock(tmp_path):
    """While another process has the lock, a worker is replaced, and the server ends."""
    with Server(tmp_path, workers=2) as server, locked(tmp_path / 'plants.jsonl'):
        replace_worker(server)
        assert server.ask(request('GET', '/livez')).status == 200
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0


FAILING_READ = [
    'def load(*, wait=True): 1 / wait',
    'def when_ready(server): server.app.callable.store.load = load',
]


def test_read_before_a_fork_stops_no_fork(tmp_path):
    """The master reads on before a fork; whatever that raises, the worker starts."""
    with Server(tmp_path, conf=FAILING_READ) as server:
        assert 'division by zero' in server.log
        replace_worker(server)
        assert server.ask(request(body=fern())).status == 200


# ---- SIGHUP of a terminal


def start(directory, *, ignored=False):
    """Start a server in the foreground of a new terminal; return both."""
    command = [*GUNICORN, '-w1', '-b127.0.0.1:0', '-ppid', '--error-logfile=log']
    if ignored:
        command = ['nohup', *command]
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover
        os.chdir(directory)
        os.environ['PLANTS_TOKENS'] = 'a' * 32
        os.execvp(command[0], command)
    log = directory / 'log'
    wait_until(lambda: log.exists() and 'Booting' in log.read_text(), 'it serves')
    return pid, terminal, log


@pytest.mark.parametrize('ignored', [False, True])
def test_closed_terminal_ends_the_service(tmp_path, ignored):
    """It does, as for each program; after ``nohup`` the service goes on."""
    pid, terminal, log = start(tmp_path, ignored=ignored)
    try:
        os.close(terminal)
        if ignored:
            wait_until(lambda: is_alive(pid), 'it lives')
            os.kill(pid, signal.SIGHUP)
            wait_until(lambda: log.read_text().count('Booting') == 2, 'it reloads')
        else:
            wait_until(lambda: not is_alive(pid), 'it ends', 20)
            assert 'Shutting down' in log.read_text()
            assert not (tmp_path / 'pid').exists()
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def test_sighup_of_a_terminal_that_is_open_reloads(tmp_path):
    """Also for a server in the foreground of a terminal."""
    pid, terminal, log = start(tmp_path)
    try:
        os.kill(pid, signal.SIGHUP)
        wait_until(lambda: log.read_text().count('Booting') == 2, 'it reloads')
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_worker_ignores_sighup(tmp_path):
    """Whoever closes a window sends SIGHUP to workers, too."""
    with Server(tmp_path) as server, server.connect() as client:
        assert client.ask(request('GET', '/livez')).status == 200
        [worker] = server.worker_pids()
        os.kill(worker, signal.SIGHUP)
        for _ in range(20):
            assert client.ask(request(body=fern())).status == 200
        assert server.worker_pids() == {worker}
