"""The units in ``deploy/``: checked by systemd's tools, and run without systemd."""

import os
import re
import shlex
import signal
import socket
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import pytest
from exchange import Load
from machine import client_at, copy_checkout
from server import REPOSITORY, SCRIPTS, TOKEN, finished, installed, request
from waiting import PATIENCE, wait_until

SERVICE = REPOSITORY / 'deploy/plants.service'
UNITS = sorted(SERVICE.parent.glob('plants*.*'))


def analyze(*arguments):
    """Run systemd-analyze."""
    environment = os.environ | {'SYSTEMD_COLORS': '0', 'COLUMNS': '200'}
    command = [installed('systemd-analyze', 'systemd'), *arguments]
    return finished(command, env=environment)


def unit(places=()):
    """Return the unit, with other paths: from each name to the list of its values."""
    text = SERVICE.read_text()
    for theirs, ours in places:
        text = text.replace(theirs, str(ours))
    values = {}
    for name, value in re.findall(r'^(\w+)=(.*)$', text, re.MULTILINE):
        values.setdefault(name, []).append(value)
    return values


def test_units_are_sound(tmp_path):
    """Systemd-analyze finds no fault in the units, once the programs exist."""
    assert len(UNITS) == 4
    lines = SERVICE.with_suffix('.socket').read_text().splitlines()
    assert {'SocketGroup=www-data', 'SocketMode=0660'} < set(lines), 'nginx alone'
    for path in UNITS:
        text = re.sub('(?m)^ExecStart=.*', 'ExecStart=/bin/true', path.read_text())
        (tmp_path / path.name).write_text(text)
    done = analyze('verify', *(tmp_path / path.name for path in UNITS))
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


@pytest.mark.parametrize('name', ['plants.service', 'plants-backup.service'])
def test_unit_is_hardened(name):
    """Systemd-analyze finds little, and no core file has the tokens in it."""
    path = SERVICE.with_name(name)
    done = analyze('security', '--offline=true', '--threshold=10', path)
    assert done.returncode == 0, done.stdout
    [level] = re.findall(r'Overall exposure level for \S+: ([\d.]+) ', done.stdout)
    assert float(level) <= 0.2
    settings = path.read_text().splitlines()
    assert {'LimitCORE=0', 'PrivateDevices=yes', 'UMask=0077'} < set(settings)
    assert any(line.startswith('MemoryMax=') for line in settings)


def test_stop_has_the_time_that_workers_take():
    """Systemd and compose wait for the workers; nginx closes idle connections first."""
    code = (REPOSITORY / 'gunicorn.conf.py').read_text()
    composition = (REPOSITORY / 'deploy/compose.yaml').read_text()
    [seconds] = re.findall(r'^graceful_timeout = (\d+)$', code, re.MULTILINE)
    [service, *_] = re.findall(r'stop_grace_period: (\d+)s', composition)
    assert int(seconds) < int(unit()['TimeoutStopSec'][0]) == int(service)
    assert unit()['KillMode'] == ['mixed']
    texts = (REPOSITORY / 'deploy/nginx.conf').read_text(), code
    kept = [re.search(r'keepalive(?:_timeout| =) (\d+)', text)[1] for text in texts]
    assert int(kept[0]) < int(kept[1])


class Service:
    """The service run according to its unit, with a stand-in for systemd."""

    def __init__(self, directory):
        self._installed = directory / 'plants'
        self._path = directory / 'plants.sock'
        self.log_path = directory / 'service.log'
        self.plants_path = directory / 'state/plants.jsonl'
        self.plants_path.parent.mkdir()
        self.unit = unit(
            [
                ('/opt/plants/.venv/bin', SCRIPTS),
                ('/opt/plants', self._installed),
                ('/var/lib/plants', self.plants_path.parent),
                ('%d', directory),
            ]
        )
        [credential] = self.unit['LoadCredential']
        (directory / credential.split(':')[0]).write_text(f'garden {TOKEN}\n')
        self._listen()
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(directory / 'notify'))
        self._notified.settimeout(PATIENCE)

    def close(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listening.close()
        self._notified.close()

    def install(self, version):
        """Make a checkout of a version, and the link to it."""
        checkout = Path(f'{self._installed}-{version}')
        if not checkout.exists():
            checkout.mkdir()
            copy_checkout(checkout)
            path = checkout / 'store/__init__.py'
            code = re.sub(r"(?<=__version__ = ').*(?=')", version, path.read_text())
            path.write_text(code)
        subprocess.run(['ln', '-sfn', checkout.name, self._installed], check=True)

    def _listen(self):
        self._path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self._path))
        self._listening.listen(128)

    def systemctl(self, verb, *units):
        """Stop or start the units, of which one is the service."""
        if verb == 'stop':
            self.process.terminate()
            self.process.wait(PATIENCE)
            if 'plants.socket' in units:
                self._listening.close()
            else:
                self.start(for_client=True)
        else:
            self._listening.close()
            self._listen()
            self.start()

    def start(self, *, for_client=False):
        """Start the service at once, and wait until it is READY, or for a client."""
        descriptor = self._listening.fileno()
        [command] = self.unit['ExecStart']
        [directory] = self.unit['WorkingDirectory']
        if for_client:
            names = [item.split('=')[0] for item in self.unit['Environment']]
            activate = installed('systemd-socket-activate', 'systemd')
            command = ' '.join([activate, *(f'-E {name}' for name in names), command])
        with self.log_path.open('ab') as log:
            self.process = subprocess.Popen(
                f'exec 3<&{descriptor}; LISTEN_PID=$$ exec {command}',
                shell=True,
                executable='/bin/bash',
                cwd=directory,
                env={
                    'PATH': os.defpath,
                    'LISTEN_FDS': '1',
                    'NOTIFY_SOCKET': self._notified.getsockname(),
                    **dict(item.split('=', 1) for item in self.unit['Environment']),
                },
                pass_fds=[descriptor],
                stderr=log,
                start_new_session=True,
            )
        assert self.unit['Type'] == ['notify']
        if not for_client:
            assert 'READY=1' in self._notified.recv(4096).decode().splitlines()

    def restart(self):
        self.process.terminate()
        [seconds] = self.unit['TimeoutStopSec']
        assert self.process.wait(int(seconds)) == 0
        self.start()

    def connect(self):
        return client_at(self._path)

    def ask(self, data):
        with self.connect() as client:
            return client.ask(data)


@pytest.fixture
def service(tmp_path):
    """The running service, with one token."""
    with closing(Service(tmp_path)) as service:
        service.install('1')
        service.start()
        yield service


def test_service_reloads(service):
    """A reload replaces the workers, and not the main process."""

    def workers():
        return service.log_path.read_text().count('Booting worker with pid')

    number = len(os.sched_getaffinity(0))
    wait_until(lambda: workers() == number, 'all workers are started')
    [command] = service.unit['ExecReload']
    command = command.replace('$MAINPID', str(service.process.pid))
    subprocess.run(shlex.split(command), check=True)
    wait_until(lambda: workers() == 2 * number, 'the workers are replaced')
    assert service.process.poll() is None
    assert service.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200


def test_restart_refuses_no_connection(service):
    """Clients that connect during a restart wait, and get a response."""
    with Load(service) as load:
        load.wait_for_all()
        service.restart()
        load.wait_for_all()
    assert not load.failed
    assert len(service.plants_path.read_bytes().splitlines()) == len(load.added)


def test_upgrade_takes_a_restart(service):
    """A switched link takes effect at a restart, also the one that leads back."""

    def version():
        return service.ask(request('GET', '/openapi.json')).json['info']['version']

    assert service.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200
    for number in ('2', '1'):
        before = version()
        service.install(number)
        assert version() == before
        service.restart()
        assert version() == number
    assert service.ask(request(body={'id': 1, 'name': 'Moss'})).json['error'] == 40006


def test_restore_loses_nothing_that_is_added_meanwhile(service, tmp_path):
    """A client that sends plants between the steps of the page loses none of them."""
    page = (REPOSITORY / 'docs/deploying.md').read_text()
    [block] = re.findall('### A restore.*?```console\n(.*?)```', page, re.DOTALL)
    for theirs, ours in [
        ('.venv/bin', SCRIPTS),
        ('/opt/plants', service.unit['WorkingDirectory'][0]),
        ('/var/lib/plants', service.plants_path.parent),
        ('chown plants:', f'chown {os.getuid()}'),
    ]:
        assert theirs in block
        block = block.replace(theirs, str(ours))
    added = []

    def add():
        with suppress(ConnectionRefusedError):
            id = len(added)
            if service.ask(request(body={'id': id, 'name': 'Fern'})).status == 200:
                added.append(b'{"id":%d,"name":"Fern"}' % id)

    add()
    (tmp_path / 'plants-backup').mkdir()
    backup = tmp_path / 'plants-backup/plants-20260101T000000Z.jsonl'
    backup.write_bytes(service.plants_path.read_bytes())
    directory = tmp_path
    for step in re.findall('^# (.*)', block, re.MULTILINE):
        program, *arguments = step.split()
        if program == 'systemctl':
            service.systemctl(*arguments)
        elif program == 'cd':
            [directory] = arguments
        else:
            subprocess.run(['bash', '-c', step], cwd=directory, check=True)
        add()
    assert service.plants_path.read_bytes().splitlines() == added
    assert len(added) == 2, 'it serves before and after, and not in between'
