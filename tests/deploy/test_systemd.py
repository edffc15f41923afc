"""The units in ``deploy/``: checked by systemd's tools, and run without systemd."""

import os
import re
import shlex
import signal
import socket
import subprocess
from contextlib import closing, suppress

import pytest
from exchange import Load
from machine import client_at, copy_checkout
from server import REPOSITORY, SCRIPTS, TOKEN, finished, installed, wait_until
from waiting import PATIENCE

SERVICE = REPOSITORY / 'deploy/plants.service'


@pytest.mark.parametrize('name', ['plants.service', 'plants-backup.service'])
def test_units_are_sound_and_hardened(tmp_path, name):
    """Systemd-analyze finds no fault in the units, and little exposure."""
    analyze = installed('systemd-analyze', 'systemd')
    for path in SERVICE.parent.glob('plants*.*'):
        text = re.sub('(?m)^ExecStart=.*', 'ExecStart=/bin/true', path.read_text())
        (tmp_path / path.name).write_text(text)
    done = finished([analyze, 'verify', *sorted(tmp_path.iterdir())])
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
    command = [analyze, 'security', '--offline=true', '--threshold=2', tmp_path / name]
    done = finished(command, env=os.environ | {'COLUMNS': '200'})
    assert done.returncode == 0, done.stdout


class Service:
    """The service run according to its unit, with a stand-in for systemd."""

    def __init__(self, directory):
        self._path = directory / 'plants.sock'
        self.log_path = directory / 'service.log'
        self.plants_path = directory / 'state/plants.jsonl'
        self.plants_path.parent.mkdir()
        text = SERVICE.read_text().replace('/opt/plants/.venv/bin', str(SCRIPTS))
        text = text.replace('/opt/plants', f'{directory}/installed')
        text = text.replace('/var/lib/plants', str(self.plants_path.parent))
        unit = re.findall(r'^(\w+)=(.*)$', text.replace('%d', str(directory)), re.M)
        self.unit = dict(unit)
        self._variables = dict(
            x.split('=', 1) for name, x in unit if name == 'Environment'
        )
        (directory / 'installed').mkdir()
        copy_checkout(directory / 'installed')
        (directory / self.unit['LoadCredential'].split(':')[0]).write_text(TOKEN)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self._path))
        self._listening.listen(128)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(directory / 'notify'))
        self._notified.settimeout(PATIENCE)

    def close(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listening.close()
        self._notified.close()

    def start(self):
        """Start the service, and wait until it has notified systemd."""
        variables = {'PATH': os.defpath, 'LISTEN_FDS': '1', 'WEB_CONCURRENCY': '2'}
        variables |= {'NOTIFY_SOCKET': self._notified.getsockname(), **self._variables}
        descriptor = self._listening.fileno()
        command = f'exec 3<&{descriptor}; LISTEN_PID=$$ exec {self.unit["ExecStart"]}'
        with self.log_path.open('ab') as log:
            self.process = subprocess.Popen(
                ['bash', '-c', command],
                cwd=self.unit['WorkingDirectory'],
                env=variables,
                pass_fds=[descriptor],
                stderr=log,
                start_new_session=True,
            )
        assert self.unit['Type'] == 'notify'
        assert 'READY=1' in self._notified.recv(4096).decode().splitlines()

    def connect(self):
        return client_at(self._path)

    def ask(self, data):
        with self.connect() as client:
            return client.ask(data)


def test_reload_and_restart_refuse_no_client(tmp_path):
    """In a reload and a restart clients wait; the main process of a reload stays."""
    with closing(Service(tmp_path)) as service:
        service.start()
        with Load(service) as load:
            load.wait_for_all()
            before = service.process.pid
            command = service.unit['ExecReload'].replace('$MAINPID', str(before))
            subprocess.run(shlex.split(command), check=True)
            wait_until(
                lambda: service.log_path.read_text().count('Booting worker') == 4,
                'the workers are replaced',
            )
            load.wait_for_all()
            assert service.process.poll() is None
            service.process.terminate()
            assert service.process.wait(int(service.unit['TimeoutStopSec'])) == 0
            service.start()
            load.wait_for_all()
        assert not load.failed
        assert len(service.plants_path.read_bytes().splitlines()) == len(load.added)
