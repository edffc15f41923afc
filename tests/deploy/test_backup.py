"""The backup in ``deploy/``, run as its unit runs it, on other paths."""

import os
import re
import resource
import shlex
import subprocess
from functools import partial

import pytest
from server import REPOSITORY, SCRIPTS, Server, finished, request

from store import Plant
from store.jsonl.record import encode

UNIT = (REPOSITORY / 'deploy/plants-backup.service').read_text()
LINES = [encode(Plant(id, 'Fern')) for id in range(100)]
DAMAGED = [*LINES[:30], b'{"id":30\n', *LINES[31:]]
OLD = 'plants-20260101T000000Z.jsonl'


@pytest.fixture
def backups(checkout, tmp_path):
    """The directory of the backups, in which there is an old one."""
    (tmp_path / 'deploy').symlink_to(REPOSITORY / 'deploy')
    (tmp_path / '.venv').symlink_to(SCRIPTS.parent)
    (tmp_path / 'plants.jsonl').write_bytes(b''.join(LINES))
    (tmp_path / 'backups').mkdir()
    (tmp_path / 'backups' / OLD).write_bytes(b''.join(LINES[:50]))
    return tmp_path / 'backups'


def run(backups, keep='14', **options):
    """Run the command of the unit; return the exit code and the output."""
    unit = UNIT.replace('/var/lib/plants-backup', str(backups))
    unit = re.sub('/opt/plants|/var/lib/plants', str(backups.parent), unit)
    [command] = re.findall('^ExecStart=(.*) 14$', unit, re.MULTILINE)
    [variable] = re.findall('^Environment=(.*)$', unit, re.MULTILINE)
    environment = {'PATH': os.defpath, **dict([variable.split('=', 1)])}
    command = [*shlex.split(command), keep]
    done = finished(command, env=environment, stderr=subprocess.STDOUT, **options)
    return done.returncode, done.stdout


def test_backup_has_what_a_running_server_acknowledged(backups):
    """A backup beside a server is verified, private, and has every plant so far."""
    with Server(backups.parent, workers=2) as server:
        assert server.ask(request(body={'id': 100, 'name': 'Moss'})).status == 200
        code, printed = run(backups)
    [new] = {path.name for path in backups.iterdir()} - {OLD}
    assert re.fullmatch(r'plants-\d{8}T\d{6}Z\.jsonl', new)
    assert (code, printed) == (0, f'{backups / new}: 101 plants verified, no damage\n')
    expected = b''.join([*LINES, encode(Plant(100, 'Moss'))])
    assert (backups / new).read_bytes() == expected
    assert (backups / new).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize('keep', [1, 2])
def test_newest_backups_are_kept(backups, keep):
    """The oldest are removed, never the new one, nor files of others."""
    newer = OLD.replace('2026', '2097')
    other = 'plants-20250101T000000Z.jsonl.gz'
    for name in newer, other, 'plants-export.jsonl':
        (backups / name).touch()
    code, printed = run(backups, keep=str(keep))
    assert code == 0
    names = sorted(path.name for path in backups.glob('plants-2*Z.jsonl'))
    assert names == [newer, 'plants-20970101T000001Z.jsonl'][-keep:]
    assert printed == f'{backups / names[-1]}: 100 plants verified, no damage\n'
    assert (backups / names[-1]).read_bytes() == b''.join(LINES)
    assert {other, 'plants-export.jsonl'} <= {path.name for path in backups.iterdir()}


# No file grows beyond 1,000 bytes, as on a full disk.
FULL = {'preexec_fn': partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1000, 1000))}


@pytest.mark.parametrize(
    ('lines', 'how', 'sentence'),
    [
        (DAMAGED, {}, r'line 31 \(byte \d+\) is damaged'),
        (None, {}, 'No such file'),
        (LINES, FULL, 'File too large'),
        (LINES[:1], {}, f'{OLD} has 50: find out'),
        (LINES, {'keep': '0'}, 'KEEP is a number from 1 on'),
    ],
    ids=['damaged', 'missing', 'disk full', 'fewer plants', 'keeps none'],
)
def test_failure_is_reported_and_removes_nothing(backups, lines, how, sentence):
    """A failure has an exit code and a sentence; the older backups stay alone."""
    plants = backups.parent / 'plants.jsonl'
    plants.unlink() if lines is None else plants.write_bytes(b''.join(lines))
    code, printed = run(backups, **{'keep': '1', **how})
    assert code != 0
    assert re.search(sentence, printed), printed
    assert [path.name for path in backups.iterdir()] == [OLD]
