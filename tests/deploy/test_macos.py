"""macOS: what people do on a laptop, on a Mac or, on Linux, in a simulation of one."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import psycopg.generators
import pytest
from exchange import fern, table
from psycopg.conninfo import conninfo_to_dict
from server import Server, finished, is_alive, request, wait_until

from store import StoreUnavailable, open_store

IS_MAC = sys.platform == 'darwin'
# With an option, or the server would be forked from a process that is not simulated.
PYTHON = sys.executable, '-s', '-m'


@pytest.fixture
def environment(tmp_path):
    """Return the variables of a simulated Mac, none on a real one."""
    simulation = Path(__file__).with_name('macos')
    syncs = {'MACOS_SYNCS': str(tmp_path / 'syncs'), 'PYTHONPATH': str(simulation)}
    return {} if IS_MAC else syncs


def test_server_and_commands_work(checkout, environment, tmp_path):
    """Whatever happens no plant is lost: each add has had an F_FULLFSYNC."""
    plants = [fern() | {'id': id} for id in range(12)]
    path = checkout / 'plants.jsonl'

    def add(server, *new):
        for plant in new:
            assert server.ask(request(body=plant)).status == 200
            if not IS_MAC:
                text = Path(environment['MACOS_SYNCS']).read_text()
                syncs = [json.loads(line) for line in text.splitlines()]
                status = path.stat()
                assert [status.st_ino, status.st_size] in syncs
                assert not [id for id, size in syncs if size < 0], 'there was an fsync'

    def start():
        return Server(checkout, command=(*PYTHON, 'gunicorn'), workers=2, **environment)

    with start() as server:
        add(server, *plants[:3])
        killed, other = server.worker_pids()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(server.worker_pids()) == 2, 'a new worker starts')
        add(server, *plants[:6])
        server.reload()
        assert not is_alive(other)
        add(server, *plants[4:8])
        if not IS_MAC:
            worker = max(server.worker_pids())
            limits = Path(f'/proc/{worker}/limits').read_text()
            assert re.search(r'Max open files +10240 ', limits)
    with start() as server:  # the one before was killed
        add(server, *plants)
        assert server.ask(request('GET', '/readyz')).status == 200
        assert server.plants() == plants
        assert 'Traceback' not in server.log

    def run(*arguments):
        command = [*PYTHON, *arguments]
        return finished(command, cwd=checkout, env=os.environ | environment, check=True)

    checked = run('gunicorn', '--check-config', '--bind', '127.0.0.1:0')
    assert 'would start' in checked.stdout
    listed = run('store', 'list').stdout.splitlines()
    assert list(map(json.loads, listed)) == plants
    run('store', 'copy', 'jsonl:plants.jsonl', 'jsonl:copy.jsonl')
    assert (checkout / 'copy.jsonl').read_bytes() == path.read_bytes()
    with path.open('ab') as file:
        file.write(b'{"id":')
    run('store', 'check', '--repair', 'jsonl:plants.jsonl')
    assert '12 plants' in run('store', 'check', 'jsonl:plants.jsonl').stdout


URLS = {
    'macOS': ('darwin', '', 'disable'),
    'macOS, as the URL says': ('darwin', '?gssencmode=prefer', 'prefer'),
    'Linux': ('linux', '', None),
}


@table('platform, query, expected', URLS)
def test_no_gssapi_in_a_forked_worker(monkeypatch, platform, query, expected):
    """GSSAPI in libpq ends a forked process on macOS, so it is off there."""
    asked = []

    def connect(conninfo, **_):
        asked.append(conninfo_to_dict(conninfo).get('gssencmode'))
        raise psycopg.OperationalError('no server')

    monkeypatch.setattr(sys, 'platform', platform)
    monkeypatch.setattr(psycopg.generators, 'connect', connect)
    url = f'postgresql://nobody@127.0.0.1/plants{query}'
    with open_store(url) as store, pytest.raises(StoreUnavailable):
        store.ping()
    assert set(asked) == {expected}
