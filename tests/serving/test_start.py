"""Startup: commands, refusals, checks, tokens, users and process 1."""

import json
import os
import re
import shutil
import signal
import tempfile
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

# The first is what most people type: in a checkout, without any argument.
COMMANDS = {
    'gunicorn': [SCRIPTS / 'gunicorn'],
    'waitress-serve': [SCRIPTS / 'waitress-serve', '--listen=127.0.0.1:0', 'app:app'],
}


@table('command', COMMANDS)
def test_command_serves(checkout, command):
    """Every command that people type in a checkout serves."""
    plant = fern()
    with Server(checkout, command=command, workers=None) as server:
        assert server.ask(request(body=plant)).status == 200
        assert server.plants() == [plant]


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
WRONG_SETTINGS = {
    'ours': (
        {'PLANTS_LOG': 'x', 'PLANTS_MAX_BODY': '0', 'PLANTS_STORE': f'sql:{SECRET}'},
        ['PLANTS_LOG', 'PLANTS_MAX_BODY', 'PLANTS_STORE'],
    ),
    'of gunicorn': (
        {OPTIONS: '-b 127.0.0.1:0 -w 0 --worker-tmp-dir no'},
        ['workers', 'worker_tmp_dir'],
    ),
    'certificate': ({OPTIONS: '-b 127.0.0.1:0 --certfile no.pem'}, ['certfile']),
    'two workers': (
        {'PLANTS_STORE': 'memory:', 'WEB_CONCURRENCY': '2'},
        ['memory:'],
    ),
    '--reload': ({OPTIONS: '--reload -b 127.0.0.1:0'}, ['reload']),
    'no directory': ({'PLANTS_STORE': 'jsonl:no/plants'}, ['no/plants']),
    'damaged file': ({'PLANTS_STORE': 'jsonl:damaged'}, ['line 2']),
}


@table('variables, words', WRONG_SETTINGS)
def test_wrong_settings_stop_a_start_and_a_check(tmp_path, variables, words):
    """Each fault is a sentence; exit code 1, no file; a check opens no store."""
    (tmp_path / 'damaged').write_bytes(DAMAGED)
    variables = {OPTIONS: '-b 127.0.0.1:0 --worker-tmp-dir .', **variables}
    for arguments in (['--check-config'], ['-p', 'pid']):
        is_sound = 'jsonl' in str(variables) and len(arguments) == 1
        server = Server(
            tmp_path, *arguments, PLANTS_METRICS_TOKEN='m' * 30, **variables
        )
        assert server.run() == (not is_sound)
        lines = [x for x in server.log.splitlines() if '[INFO]' not in x]
        for word, line in zip([] if is_sound else words, lines, strict=True):
            assert word in line
        assert SECRET not in server.log
        assert {path.name for path in tmp_path.iterdir()} == {'server.log', 'damaged'}
        assert (tmp_path / 'damaged').read_bytes() == DAMAGED


def test_check_makes_nothing(tmp_path):
    """A check makes no plant file, and refuses a token that nobody would see."""
    assert Server(tmp_path, '--check-config').run() == 0
    server = Server(tmp_path, '--check-config', '--daemon', PLANTS_TOKENS=None)
    assert server.run() == 1
    assert [path.name for path in tmp_path.iterdir()] == ['server.log']


def test_start_at_a_taken_address_leaves_nothing(service, tmp_path):
    """No pid file and no directory of counters; the other server goes on."""
    options = f'-b 127.0.0.1:{service.port} -p pid --worker-tmp-dir .'
    variables = {OPTIONS: options, 'PLANTS_METRICS_TOKEN': 'm' * 30}
    at_once = ['import time', 'time.sleep = lambda seconds: None']  # five attempts
    assert Server(tmp_path, conf=at_once, **variables).run() == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {'server.log', 'plants.jsonl', 'more.conf.py'}
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
        for number in (signal.SIGTTIN, signal.SIGTTIN, signal.SIGUSR1):
            server.signal(number)
            name = signal.Signals(number).name[3:].lower()
            # Signals are handled one after the other.
            wait_until(lambda name=name: f'signal: {name}' in server.log, 'it is heard')
        assert server.worker_pids() == before


# A plant file that takes long to read.
SLOW = ['import time', 'from store.jsonl import JSONLinesStore']
SLOW += ['def load(self, *, wait=True):', '    print("loading", flush=True)']
SLOW += ['    time.sleep(3600)', 'JSONLinesStore.load = load']


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
        (public / 'plants.key').chmod(0o600)
        tls = ('--certfile', 'plants.pem', '--keyfile', 'plants.key')
        assert Server(public, *user, *tls).run() == 1
        with Server(public, *user, PLANTS_METRICS_TOKEN=token) as server:
            for _ in range(2):
                assert server.ask(request(body=fern())).status == 200
                assert server.ask(metrics).status == 200
                server.reload()
            assert (public / 'plants.jsonl').owner() == 'nobody'
