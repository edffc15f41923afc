"""The units in ``deploy/``, also of the backup: checked by systemd, and run without."""

import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
from functools import partial

import pytest
from exchange import Load, table
from machine import client_at, copy_checkout
from server import REPOSITORY, SCRIPTS, TOKEN, Server, finished, installed, wait_until
from waiting import PATIENCE

SERVICE = REPOSITORY / 'deploy/plants.service'
# ``SystemCallFilter`` forbids these calls, also those that would change nothing.
FILTER = 'import os; os.chown = os.setegid = os.seteuid = os.setgid = os.setuid = None'


def test_units_are_sound_and_hardened(tmp_path):
    """Systemd-analyze finds no fault in the units, and little exposure."""
    analyze = installed('systemd-analyze', 'systemd')
    for path in SERVICE.parent.glob('plants*.*'):
        text = re.sub('(?m)^ExecStart=.*', 'ExecStart=/bin/true', path.read_text())
        (tmp_path / path.name).write_text(text)
    tries = r'(?s)\nStartLimitIntervalSec=0\n.*\nRestartSec=[2-9]\nOOMPolicy=cont'
    assert re.search('EnvironmentFile=.*', SERVICE.read_text())[0] in BACKUP
    assert re.search(tries, SERVICE.read_text()), 'it never gives up'
    done = finished([analyze, 'verify', *sorted(tmp_path.iterdir())])
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
    for unit in tmp_path.glob('*.service'):
        command = [analyze, 'security', '--offline=true', '--threshold=2', unit]
        done = finished(command, env=os.environ | {'COLUMNS': '200'})
        assert done.returncode == 0, done.stdout


def test_reload_and_restart_refuse_no_client(tmp_path):
    """Clients wait; the main process of a reload stays. This stands in for systemd."""
    (state := tmp_path / 'state').mkdir()
    (checkout := tmp_path / 'installed').mkdir()
    text = SERVICE.read_text().replace('/opt/plants/.venv/bin', str(SCRIPTS))
    text = text.replace('/opt/plants', str(checkout)).replace('%d', str(tmp_path))
    lines = re.findall(r'(?m)^(\w+)=(.*)$', text.replace('/var/lib/plants', str(state)))
    unit = dict(lines)
    variables = dict(x.split('=', 1) for name, x in lines if name == 'Environment')
    copy_checkout(checkout)
    (tmp_path / unit['LoadCredential'].split(':')[0]).write_text(TOKEN)
    assert (unit['Type'], unit['WorkingDirectory']) == ('notify', str(checkout))
    path, notify = tmp_path / 'plants.sock', tmp_path / 'notify'
    variables |= {'LISTEN_FDS': '1', 'NOTIFY_SOCKET': str(notify)}
    variables |= {'PLANTS_TOKENS': None, 'GUNICORN_CMD_ARGS': '-b :1'}
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
        with service.started(), Load(service) as load:
            load.wait_for_all()
            assert b'READY=1' in notified.recv(4096).splitlines()
            before = service.worker_pids()
            reload = unit['ExecReload'].replace('$MAINPID', str(service.pid))
            finished(shlex.split(reload), check=True)
            wait_until(lambda: not before & service.worker_pids(), 'the old ones end')
            load.wait_for_all()
            service.signal(signal.SIGTERM)
            assert service.wait(int(unit['TimeoutStopSec'])) == 0
            service.start()
            load.wait_for_all()
        assert (load.failed, 'bind: it has no eff' in service.log) == ([], True)
    assert len((state / 'plants.jsonl').read_bytes().splitlines()) == len(load.added)


# ---- the backup

BACKUP = (REPOSITORY / 'deploy/plants-backup.service').read_text()
LINES = [b'{"id":%d,"name":"Fern"}\n' % id for id in range(100)]
OLD = 'plants-20260101T000000Z.jsonl'


@pytest.fixture
def backups(tmp_path):
    """The directory of the backups, in which there is an old one."""
    (tmp_path / 'store').symlink_to(REPOSITORY / 'store')
    shutil.copytree(REPOSITORY / 'deploy', tmp_path / 'deploy')
    (tmp_path / 'link').symlink_to('deploy/backup.sh')
    (tmp_path / '.venv').symlink_to(SCRIPTS.parent)
    (tmp_path / 'plants.jsonl').write_bytes(b''.join(LINES))
    (tmp_path / 'backups').mkdir()
    (tmp_path / 'backups' / OLD).write_bytes(b''.join(LINES[:50]))
    return tmp_path / 'backups'


def run(backups, keep='14', program=None, end='', **options):
    """Run the command of the unit, or of another name; return the exit code."""
    unit = BACKUP.replace('/var/lib/plants-backup', f'{backups}{end}')
    unit = re.sub('/opt/plants|/var/lib/plants', str(backups.parent), unit)
    [[own, arguments]] = re.findall('(?m)^ExecStart=(.*?) (.*) 14$', unit)
    given = dict(re.findall('(?m)^Environment=(.*?)=(.*)$', unit), PATH=os.defpath)
    command = [program or own, *shlex.split(arguments), keep]
    done = finished(command, env=given, stderr=subprocess.STDOUT, **options)
    assert done.stdout, 'it says what it did, or why not'
    assert ('mounted' in str(done.stdout)) == (backups.name == 'new')
    return done.returncode


@pytest.mark.parametrize('end', ['', '/', '-link'])
def test_newest_backups_are_kept(backups, end):
    """The oldest are removed, never the new one, nor files of others; also by link."""
    (backups.parent / 'backups-link').symlink_to('backups')
    newer = OLD.replace('2026', '2097')  # the clock was ahead
    others = {'plants-20250101T000000Z.jsonl.gz', 'plants-export.jsonl'}
    for name in newer, 'unfinished.AAAAAA', *others:
        (backups / name).touch()
        os.utime(backups / name, (0, 0))
    other = backups.with_name('new')
    assert run(other) == run(backups, '2', other.with_name('link'), end) == 0
    new = backups / 'plants-20970101T000001Z.jsonl'
    assert {path.name for path in backups.iterdir()} == {newer, new.name, *others}
    assert new.read_bytes() == b''.join(LINES)
    assert new.stat().st_mode & 0o077 == 0, 'it is private'


# No file grows beyond 1,000 bytes, as on a full disk.
FULL = {'preexec_fn': partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1000, 1000))}

FAILURES = {
    'damaged': ([*LINES[:30], b'{"id":30\n', *LINES[31:]], {}),
    'disk full': (LINES, FULL),
    'fewer plants': (LINES[:1], {}),
    'keeps none': (LINES, {'keep': '0'}),
    'keeps no number': (LINES, {'keep': '+1'}),
}


@table('lines, how', FAILURES)
def test_failure_is_reported_and_removes_nothing(backups, lines, how):
    """A failure has an exit code; the older backups stay alone."""
    (backups.parent / 'plants.jsonl').write_bytes(b''.join(lines))
    assert run(backups, **{'keep': '1', **how}) != 0
    assert [path.name for path in backups.iterdir()] == [OLD]
