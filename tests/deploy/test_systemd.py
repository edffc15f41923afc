"""The units of ``deploy/``: reviewed by systemd's tools, and run as systemd would."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from server import PATIENCE
from server import REPOSITORY
from server import ROOMS
from server import SCRIPTS
from server import TOKEN
from server import RawClient
from server import installed
from server import is_alive
from server import request
from server import socket_to
from server import wait_until

UNITS = [REPOSITORY / 'deploy' / name for name in ('plants.service', 'plants.socket')]


def analyze(*arguments):
    """Run systemd-analyze."""
    return subprocess.run(
        [installed('systemd-analyze', 'systemd'), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {'SYSTEMD_COLORS': '0', 'COLUMNS': '200'},
    )


def unit(section, path=UNITS[0]):
    """Return what a section of a unit says, each name with the list of its values."""
    [text] = re.findall(
        rf'^\[{section}\]\n(.*?)(?:\Z|^\[)', path.read_text(), re.M | re.S
    )
    said = {}
    for name, value in re.findall(r'^(\w+)=(.*)$', text, re.M):
        said.setdefault(name, []).append(value)
    return said


# ---- systemd: what its own tools say


def test_units_are_sound(tmp_path):
    """Systemd finds nothing wrong with the units where the service is installed."""
    for path in UNITS:
        text = path.read_text().replace('/opt/plants/.venv/bin/gunicorn', '/bin/true')
        (tmp_path / path.name).write_text(text)
    done = analyze('verify', *(tmp_path / path.name for path in UNITS))
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_unit_is_hardened():
    """Systemd's own review leaves the service next to nothing that it could do."""
    done = analyze('security', '--offline=true', '--threshold=10', UNITS[0])
    assert done.returncode == 0, done.stdout
    [level] = re.findall(r'Overall exposure level for \S+: ([\d.]+) ', done.stdout)
    assert float(level) <= 1.0


def test_unit_waits_for_the_workers():
    """Systemd waits longer for a stop than the workers may take."""
    code = (REPOSITORY / 'gunicorn.conf.py').read_text()
    [seconds] = re.findall(r'^graceful_timeout = (\d+)$', code, re.MULTILINE)
    assert int(unit('Service')['TimeoutStopSec'][0]) > int(seconds)


# ---- systemd: what it does with the service, done by hand


class Service:
    """The service as its unit says, with what systemd does for it.

    There is a socket that outlives the service, one for what the service notifies of,
    and a copy of the tokens that is made at the start. What is not here is the sandbox.

    Args:
        directory: In place of the root of the file system.
    """

    def __init__(self, directory):
        self.log_path = directory / 'service.log'
        self.plants_path = directory / 'state/plants.jsonl'
        self.tokens_path = directory / 'tokens'
        self._credentials = directory / 'credentials'
        for path in (self.plants_path.parent, self._credentials, directory / 'opt'):
            path.mkdir()
        for name in ROOMS:
            (directory / 'opt' / name).symlink_to(REPOSITORY / name)
        self._path = directory / 'plants.sock'
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self._path))
        self._listening.listen(128)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(directory / 'notify'))
        self._notified.settimeout(PATIENCE)
        self._unit = unit('Service')
        self._places = {
            '/opt/plants/.venv/bin': SCRIPTS,
            '/opt/plants': directory / 'opt',
            '/var/lib/plants': self.plants_path.parent,
            '/etc/plants/tokens': self.tokens_path,
            '%d': self._credentials,
        }

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listening.close()
        self._notified.close()

    def start(self):
        """Start it, and wait until it says that it is ready."""
        [(id, path)] = (self._said(x).split(':') for x in self._unit['LoadCredential'])
        shutil.copy(path, self._credentials / id)
        descriptor = self._listening.fileno()
        [command] = self._unit['ExecStart']
        script = f'exec 3<&{descriptor}; LISTEN_PID=$$ exec {self._said(command)}'
        [directory] = self._unit['WorkingDirectory']
        with self.log_path.open('ab') as log:
            self.process = subprocess.Popen(
                ['bash', '-c', script],
                cwd=self._said(directory),
                env={
                    'PATH': os.defpath,
                    'LISTEN_FDS': '1',
                    'NOTIFY_SOCKET': self._notified.getsockname(),
                    **dict(
                        self._said(x).split('=', 1) for x in self._unit['Environment']
                    ),
                },
                pass_fds=[descriptor],
                stderr=log,
                start_new_session=True,
            )
        assert self._unit['Type'] == ['notify']
        assert 'READY=1' in self._notified.recv(4096).decode().splitlines()

    def reload(self):
        [command] = self._unit['ExecReload']
        command = command.replace('$MAINPID', str(self.process.pid))
        subprocess.run(shlex.split(command), check=True)

    def stop(self):
        self.process.terminate()
        [seconds] = self._unit['TimeoutStopSec']
        assert self.process.wait(int(seconds)) == 0

    def ask(self, data):
        with RawClient(over=socket_to(self._path)) as client:
            return client.ask(data)

    def _said(self, text):
        for theirs, ours in self._places.items():
            text = text.replace(theirs, str(ours))
        return text


@pytest.fixture
def service(tmp_path):
    """The service, as systemd runs it, with a token."""
    with Service(tmp_path) as service:
        service.tokens_path.write_text(f'garden {TOKEN}\n')
        service.start()
        yield service


def test_service_serves(service):
    """It takes the socket, the tokens and the place for plants from systemd."""
    plant = {'id': 1, 'name': 'Fern'}
    assert service.ask(request(body=plant)).status == 200
    assert [json.loads(service.plants_path.read_bytes())] == [plant]
    log = service.log_path.read_text()
    assert f'Listening at: unix:{service.plants_path.parent.parent}/plants.sock' in log
    service.stop()


def test_service_reloads(service):
    """A reload replaces the workers and lets the main process be."""

    def workers():
        log = service.log_path.read_text()
        return set(map(int, re.findall(r'Booting worker with pid: (\d+)', log)))

    number = len(os.sched_getaffinity(0))
    wait_until(lambda: len(workers()) == number, 'all workers are there')
    old = workers()
    service.reload()
    wait_until(lambda: not any(map(is_alive, old)), 'the old workers end')
    assert len(workers() - old) == number
    assert service.process.poll() is None
    assert service.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200


def test_restart_refuses_no_connection(service):
    """Who connects during a restart waits for it, and is answered."""
    done = threading.Event()

    def add(first_id):
        id = first_id
        while not done.is_set():
            answer = service.ask(request(body={'id': id, 'name': 'Fern'}))
            assert answer is not None, 'not answered'
            assert answer.status == 200
            id += 1
        return id - first_id

    with ThreadPoolExecutor(4) as pool:
        try:
            clients = [pool.submit(add, 1_000_000 * n) for n in range(4)]
            service.stop()
            service.start()
            assert service.ask(request(body={'id': -1, 'name': 'Fern'})).status == 200
        finally:
            done.set()
        added = sum(client.result() for client in clients)
    assert len(service.plants_path.read_bytes().splitlines()) == added + 1


def test_tokens_change_at_a_restart(service):
    """A changed tokens file counts after a restart, since it is a copy that is read."""
    other = request(body={'id': 1, 'name': 'Fern'}, authorization='Bearer other')
    service.tokens_path.write_text('garden other\n')
    assert service.ask(other).status == 401
    service.stop()
    service.start()
    assert service.ask(other).status == 200
