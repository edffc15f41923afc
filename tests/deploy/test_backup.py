"""The backup in ``deploy/``, run as its unit runs it, on other paths."""

import os
import re
import resource
import shlex
import shutil
import subprocess
from functools import partial

import pytest
from exchange import table
from server import REPOSITORY, SCRIPTS, finished

UNIT = (REPOSITORY / 'deploy/plants-backup.service').read_text()
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


def run(backups, keep='14', program=None, **options):
    """Run the command of the unit, or of another name; return the exit code."""
    unit = UNIT.replace('/var/lib/plants-backup', str(backups))
    unit = re.sub('/opt/plants|/var/lib/plants', str(backups.parent), unit)
    [command] = re.findall('^ExecStart=(.*) 14$', unit, re.MULTILINE)
    variables = re.findall('^Environment=(.*)$', unit, re.MULTILINE)
    environment = {'PATH': os.defpath, **dict(it.split('=', 1) for it in variables)}
    command = [*shlex.split(command), keep]
    command[0] = program or command[0]
    done = finished(command, env=environment, stderr=subprocess.STDOUT, **options)
    assert done.stdout, 'it says what it did, or why not'
    return done.returncode


@pytest.mark.parametrize(('keep', 'script'), [(1, 'deploy/backup.sh'), (2, 'link')])
def test_newest_backups_are_kept(backups, keep, script):
    """The oldest are removed, never the new one, nor files of others."""
    newer = OLD.replace('2026', '2097')  # the clock was ahead
    others = {'plants-20250101T000000Z.jsonl.gz', 'plants-export.jsonl'}
    for name in newer, *others:
        (backups / name).touch()
    assert run(backups, keep=str(keep), program=backups.parent / script) == 0
    names = sorted({path.name for path in backups.iterdir()} - others)
    assert names == [newer, 'plants-20970101T000001Z.jsonl'][-keep:]
    assert (backups / names[-1]).read_bytes() == b''.join(LINES)
    assert (backups / names[-1]).stat().st_mode & 0o077 == 0, 'it is private'
    assert others < {path.name for path in backups.iterdir()}


# No file grows beyond 1,000 bytes, as on a full disk.
FULL = {'preexec_fn': partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1000, 1000))}

FAILURES = {
    'damaged': ([*LINES[:30], b'{"id":30\n', *LINES[31:]], {}),
    'disk full': (LINES, FULL),
    'fewer plants': (LINES[:1], {}),
    'keeps none': (LINES, {'keep': '0'}),
}


@table('lines, how', FAILURES)
def test_failure_is_reported_and_removes_nothing(backups, lines, how):
    """A failure has an exit code; the older backups stay alone."""
    (backups.parent / 'plants.jsonl').write_bytes(b''.join(lines))
    assert run(backups, **{'keep': '1', **how}) != 0
    assert [path.name for path in backups.iterdir()] == [OLD]
