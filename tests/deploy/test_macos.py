"""macOS: what people do on a laptop, on a Mac or, on Linux, in a simulation of one."""

import json
import os
import sys
from pathlib import Path

from exchange import fern
from server import TOKEN, Server, finished, request

# With an option, or the server would be forked from a process that is not simulated.
PYTHON = sys.executable, '-s', '-m'


def test_server_and_commands_work(checkout, tmp_path):
    """Each add has had an F_FULLFSYNC, and no fsync; all commands work."""
    plants, path, notes = (
        [fern(), fern()],
        tmp_path / 'plants.jsonl',
        tmp_path / 'syncs',
    )
    is_mac = sys.platform == 'darwin'
    simulation = str(Path(__file__).with_name('macos'))
    variables = {'MACOS_SYNCS': str(notes), 'PYTHONPATH': simulation}
    variables = {} if is_mac else variables
    command = *PYTHON, 'gunicorn'
    with Server(checkout, command=command, workers=2, **variables) as server:
        for plant in plants:
            assert server.ask(request(body=plant)).status == 200
            synced = f'{path.stat().st_ino} {path.stat().st_size}\n'
            assert is_mac or synced in notes.read_text()
        assert is_mac or ' -1\n' not in notes.read_text(), 'there was an fsync'
        server.reload()
        assert server.ask(request('GET', '/readyz')).status == 200
    for arguments in (
        ('gunicorn', '--check-config'),
        ('store', 'copy', 'jsonl:plants.jsonl', 'jsonl:copy.jsonl'),
        ('store', 'check', '--repair', 'jsonl:copy.jsonl'),
    ):
        environment = os.environ | {'PLANTS_TOKENS': TOKEN} | variables
        done = finished([*PYTHON, *arguments], cwd=checkout, env=environment)
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / 'copy.jsonl').read_bytes().splitlines()
    assert list(map(json.loads, lines)) == plants
