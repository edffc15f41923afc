"""Startup: commands, refusals, checks, tokens, users and process 1."""

import json
import os
import re
import shutil
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path
from pwd import getpwnam

import pytest
from exchange import SECRET, fern, parse_json_log, table
from server import (
    GUNICORN,
    SCRIPTS,
    RawClient,
    Server,
    finished,
    is_alive,
    make_certificate,
    request,
    wait_until,
)

import serving

# The first is what most people type: in a checkout, without any argument.
COMMANDS = {
    'gunicorn': [SCRIPTS / 'gunicorn'],
    'gthread': [SCRIPTS / 'gunicorn', '-kgthread', '--threads=2'],
    'waitress-serve': [SCRIPTS / 'waitress-serve', '--listen=127.0.0.1:0', 'app:app'],
    'several addresses': [SCRIPTS / 'gunicorn', '-b127.0.0.1:0', '-blocalhost:0'],
}


@table('command', COMMANDS)
def test_command_serves(checkout, command):
    """Every command that people type in a checkout serves."""
    plant = fern()
    with Server(checkout, command=command, workers=None) as server:
        assert server.ask(request(body=plant)).status == 200
        assert server.plants() == [plant]


def test_gunicorn_is_the_version_that_was_checked():
    """The parts of gunicorn that it does not document were checked by hand."""
    assert version('gunicorn') == serving.CHECKED


def test_made_token_works_and_stays(tmp_path):
    """A token is made if none is configured, printed once, and survives a reload."""
    with Server(tmp_path, workers=2, PLANTS_TOKENS=None) as server:
        [line] = re.findall('curl .+', server.log)
        for _ in range(2):
            done = finished(['bash', '-c', f'{line} -sS --max-time 20'])
            assert json.loads(done.stdout)['name'], done
            server.reload()
        assert server.log.count('curl ') == 1
        assert server.ask(request(body=fern())).status == 401


DAMAGED = b'{"id":1,"name":"Fern"}\n{"id":2,"na\n{"id":3,"name":"Moss"}\n'
OPTIONS = 'GUNICORN_CMD_ARGS'
# Variables, and a text for each sentence of the refusal.
BAD_STARTS = {
    'several': (
        {'PLANTS_LOG': 'x', 'PLANTS_MAX_BODY': '0', 'PLANTS_STORE': f'sql:{SECRET}'},
        ['PLANTS_LOG', 'PLANTS_MAX_BODY', 'PLANTS_STORE'],
    ),
    'of gunicorn': (
        {OPTIONS: '-b 127.0.0.1:0 -w 0 --worker-tmp-dir no'},
        ['workers', 'worker_tmp_dir'],
    ),
    'certificate': ({OPTIONS: '-b 127.0.0.1:0 --certfile no.pem'}, ['certfile']),
    'memory: and two workers': (
        {'PLANTS_STORE': 'memory:', 'WEB_CONCURRENCY': '2'},
        ['memory:'],
    ),
    '--reload': ({OPTIONS: '--reload -b 127.0.0.1:0'}, ['reload']),
}


@table('variables, words', BAD_STARTS)
def test_bad_settings_stop_a_start_and_a_check(tmp_path, variables, words):
    """All faults, each a sentence that names its setting; exit code 1, and no file."""
    for arguments in (['--check-config'], ['-p', 'pid']):
        server = Server(tmp_path, *arguments, **variables)
        assert server.run() == 1
        lines = [x for x in server.log.splitlines() if '[INFO]' not in x]
        for word, line in zip(words, lines, strict=True):
            assert word in line
        assert SECRET not in server.log
        assert [path.name for path in tmp_path.iterdir()] == ['server.log']


# A file, the name of the store, and a text of the refusal.
BAD_STORES = {
    'damaged': (DAMAGED, 'jsonl:plants', 'line 2'),
    'no directory': (b'', 'jsonl:no/plants', 'no/plants'),
    'schema': (b'', 'jsonl:plants', 'Plant.json'),
}


@table('data, url, words', BAD_STORES)
def test_store_or_schema_stops_a_start(checkout, data, url, words):
    """One sentence and exit code 1; no pid file and no change is left."""
    (checkout / 'plants').write_bytes(data)
    if 'schema' in words.lower() or words == 'Plant.json':
        (checkout / 'schemas/Plant.json').write_text('{"type": ["obj"]')
    before = {path.name for path in checkout.iterdir()}
    server = Server(checkout, '-p', 'pid', command=GUNICORN[:3], PLANTS_STORE=url)
    assert server.run() == 1
    [line] = [x for x in server.log.splitlines() if '[INFO]' not in x]
    assert words in line
    made = {path.name for path in checkout.iterdir()} - before
    assert made - {'__pycache__'} == {'server.log'}
    assert (checkout / 'plants').read_bytes() == data


def test_check_opens_no_store(tmp_path):
    """A check is for settings: it neither reads, mends nor makes a plant file."""
    assert Server(tmp_path, '--check-config').run() == 0
    assert [path.name for path in tmp_path.iterdir()] == ['server.log']
    (tmp_path / 'plants.jsonl').write_bytes(DAMAGED)
    assert Server(tmp_path, '--check-config').run() == 0
    # Nobody would see a token that is made.
    server = Server(tmp_path, '--check-config', '--daemon', PLANTS_TOKENS=None)
    assert server.run() == 1


def test_start_at_a_taken_address_leaves_nothing(service, tmp_path):
    """No pid file and no directory of counters; the other server goes on."""
    options = f'-b 127.0.0.1:{service.port} -p pid --worker-tmp-dir .'
    variables = {OPTIONS: options, 'PLANTS_METRICS_TOKEN': 'm' * 30}
    assert Server(tmp_path, **variables).run() == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {'server.log', 'plants.jsonl'}
    assert service.ask(request(body=fern())).status == 200


def test_refused_start_is_json_in_a_log_of_json(tmp_path):
    """A refusal is an object of a log in JSON, also if that is set by --env."""
    server = Server(tmp_path, '--env', 'PLANTS_LOG=json', PLANTS_MAX_BODY='0')
    assert server.run() == 1
    last = parse_json_log(server.log)[-1]
    assert last['level'] == 'CRITICAL'
    assert 'PLANTS_MAX_BODY' in last['message']


def test_memory_store_keeps_one_worker(tmp_path):
    """However many cores there are, and also after SIGTTIN."""
    with Server(tmp_path, workers=None, PLANTS_STORE='memory:') as server:
        before = server.worker_pids()
        assert len(before) == 1
        for _ in range(2):
            server.signal(signal.SIGTTIN)
            wait_until(lambda: 'memory: needs one worker' in server.log, 'refused')
        server.signal(signal.SIGUSR1)  # signals are handled one after the other
        wait_until(lambda: 'signal: usr1' in server.log, 'the other is over')
        assert server.worker_pids() == before


# Long after a start: reading the plant file, however that is interrupted.
SLOW = ['import time', 'def slow(*_):', '    print("loading", flush=True)']
SLOW += ['    time.sleep(3600)', 'lifecycle.load = slow']


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signal_during_a_long_load_ends_the_start(tmp_path, number):
    """It ends at once, and leaves no pid file."""
    with Server(tmp_path, '-p', 'pid', conf=SLOW).started() as server:
        wait_until(lambda: 'loading' in server.log, 'it reads')
        server.signal(number)
        server.wait(20)
        assert not (tmp_path / 'pid').exists()
        assert 'Traceback' not in server.log


@pytest.mark.skipif(shutil.which('unshare') is None, reason='it needs unshare (Linux)')
@pytest.mark.parametrize('conf', [SLOW, []])
def test_master_may_be_process_1(tmp_path, conf):
    """In a container the master is process 1, which ignores a signal by default."""
    namespace = ['unshare', '--pid', '--fork', '--kill-child', '--mount-proc']
    if finished([*namespace, 'true']).returncode:
        pytest.skip('this user may make no namespace of processes')
    command = [*namespace, *GUNICORN]
    with Server(tmp_path, command=command, conf=conf).started() as server:
        word = 'loading' if conf else 'Booting worker'
        wait_until(lambda: word in server.log, 'it has begun')
        [child] = finished(['pgrep', '-P', str(server.pid)]).stdout.split()
        os.kill(int(child), signal.SIGTERM)
        assert server.wait(20) == 0


def test_daemon_serves_until_sigterm(tmp_path):
    """--daemon leaves the terminal, logs to its file and ends at SIGTERM."""
    log, pid = tmp_path / 'error.log', tmp_path / 'pid'
    server = Server(tmp_path, '--daemon', '-p', 'pid', '--error-logfile', 'error.log')
    server.start()
    # Not run(), which would kill what has not left the process group yet.
    assert server.wait() == 0
    wait_until(lambda: log.exists() and 'Booting worker' in log.read_text(), 'it runs')
    number = int(pid.read_text())
    try:
        port = int(re.search(r'http://127.0.0.1:(\d+)', log.read_text())[1])
        with RawClient(port) as client:
            assert client.ask(request(body=fern())).status == 200
    finally:
        os.kill(number, signal.SIGTERM)
        wait_until(lambda: not is_alive(number), 'it ends')
    assert not pid.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason='only root may serve as another user')
def test_user_that_serves_owns_the_files():
    """With --user the files belong to that user, who must be able to read the key."""
    nobody, token = getpwnam('nobody'), 'm' * 30
    user = ('--user', 'nobody', '--group', str(nobody.pw_gid))
    metrics = request('GET', '/metrics', authorization=f'Bearer {token}')
    with tempfile.TemporaryDirectory() as name:
        public = Path(name)
        os.chown(public, nobody.pw_uid, nobody.pw_gid)
        make_certificate(public)
        key = 'plants.key'
        (public / key).chmod(0o600)
        tls = ('--certfile', 'plants.pem', '--keyfile', key)
        assert Server(public, *user, *tls).run() == 1
        with Server(public, *user, PLANTS_METRICS_TOKEN=token) as server:
            for _ in range(2):
                assert server.ask(request(body=fern())).status == 200
                assert server.ask(metrics).status == 200
                server.reload()
            assert (public / 'plants.jsonl').owner() == 'nobody'
