"""The units in ``deploy/``: checked by systemd's tools, and run without systemd."""

import os
import re
import shlex
import signal
import socket

import pytest
from exchange import Load
from machine import client_at, copy_checkout
from server import REPOSITORY, SCRIPTS, TOKEN, Server, finished, installed, wait_until
from waiting import PATIENCE

SERVICE = REPOSITORY / 'deploy/plants.service'


@pytest.mark.parametrize('name', ['plants.service', 'plants-backup.service'])
def test_units_are_sound_and_hardened(tmp_path, name):
    """Systemd-analyze finds no fault in the units, and little exposure."""
    analyze = installed('systemd-analyze', 'systemd')
    for path in SERVICE.parent.glob('plants*.*'):
        text = re.sub('(?m)^ExecStart=.*', 'ExecStart=/bin/true', path.read_text())
        (tmp_path / path.name).write_text(text)
    tries = r'(?s)\nStartLimitIntervalSec=0\n.*\nRestartSec=[2-9]\n'
    assert re.search(tries, SERVICE.read_text()), 'it never gives up'
    done = finished([analyze, 'verify', *sorted(tmp_path.iterdir())])
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
    command = [analyze, 'security', '--offline=true', '--threshold=2', tmp_path / name]
    done = finished(command, env=os.environ | {'COLUMNS': '200'})
    assert done.returncode == 0, done.stdout


# ``SystemCallFilter`` forbids these calls, also those that would change nothing.
FILTER = """import os
def refuse(*arguments):
    raise PermissionError(1, 'Operation not permitted')
os.chown = os.setegid = os.seteuid = os.setgid = os.setuid = refuse
"""


@pytest.fixture
def service(tmp_path):
    """The service as its unit runs it; the test stands in for systemd."""
    state, checkout = tmp_path / 'state', tmp_path / 'installed'
    text = SERVICE.read_text().replace('/opt/plants/.venv/bin', str(SCRIPTS))
    text = text.replace('/opt/plants', str(checkout)).replace('%d', str(tmp_path))
    text = text.replace('/var/lib/plants', str(state))
    lines = re.findall(r'^(\w+)=(.*)$', text, re.M)
    unit = dict(lines)
    variables = dict(x.split('=', 1) for name, x in lines if name == 'Environment')
    for directory in state, checkout:
        directory.mkdir()
    copy_checkout(checkout)
    (tmp_path / unit['LoadCredential'].split(':')[0]).write_text(TOKEN)
    assert unit['WorkingDirectory'] == str(checkout)
    assert unit['Type'] == 'notify'
    path, notify = tmp_path / 'plants.sock', tmp_path / 'notify'
    variables |= {'LISTEN_FDS': '1', 'NOTIFY_SOCKET': str(notify)}
    variables |= {'PLANTS_TOKENS': None, 'GUNICORN_CMD_ARGS': None}
    (state / 'sitecustomize.py').write_text(FILTER)
    variables |= {'PYTHONPATH': str(state), 'PLANTS_METRICS_TOKEN': 'for-metrics'}
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
    ):
        listening.bind(str(path))
        listening.listen(128)
        listening.set_inheritable(True)
        notified.bind(str(notify))
        notified.settimeout(PATIENCE)
        script = f'exec 3<&{listening.fileno()}; LISTEN_PID=$$ exec {unit["ExecStart"]}'
        command = 'bash', '-c', script
        service = Server(checkout, command=command, workers=2, **variables)
        service.connect = lambda: client_at(path)
        service.unit, service.notified = unit, notified
        service.plants_path = state / 'plants.jsonl'
        yield service


def test_reload_and_restart_refuse_no_client(service):
    """In a reload and a restart clients wait; the main process of a reload stays."""
    with service.started():
        assert b'READY=1' in service.notified.recv(4096).splitlines()
        with Load(service) as load:
            load.wait_for_all()
            before = service.worker_pids()
            reload = service.unit['ExecReload'].replace('$MAINPID', str(service.pid))
            finished(shlex.split(reload), check=True)
            wait_until(lambda: len(service.worker_pids() - before) == 2, 'new workers')
            wait_until(lambda: not before & service.worker_pids(), 'the old ones end')
            load.wait_for_all()
            service.signal(signal.SIGTERM)
            assert service.wait(int(service.unit['TimeoutStopSec'])) == 0
            service.start()
            load.wait_for_all()
        assert not load.failed
        added = len(service.plants_path.read_bytes().splitlines())
        assert added == len(load.added)
