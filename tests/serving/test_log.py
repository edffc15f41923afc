"""What those who run the server see: its log, its start, its check, its metrics."""

import json
import os
import re
import signal
from datetime import UTC
from datetime import datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server import GUNICORN
from server import REPOSITORY
from server import ROOMS
from server import SCRIPTS
from server import TOKEN
from server import Server
from server import is_alive
from server import request
from server import wait_until

SECRET = 'a-secret-that-no-log-may-show'
FERN = {'id': 1, 'name': SECRET}
DIGEST = 'sha256:' + 'a' * 64
LOGS = pytest.mark.parametrize('log', ['text', 'json'])


def objects(text):
    """Return the lines of a log, each of which is a JSON object."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {'time', 'level', 'pid', 'logger', 'message'} <= line.keys()
    return lines


# As a script, since what `python -m gunicorn` starts at SIGUSR2 finds modules of
# gunicorn in the place of Python's.
SCRIPT = (SCRIPTS / 'gunicorn', *GUNICORN[3:])


def upgrade(server):
    """Return the process id of the new master that SIGUSR2 starts beside the old."""
    children = Path(f'/proc/{server.pid}/task/{server.pid}/children')
    before = set(children.read_text().split())
    server.signal(signal.SIGUSR2)

    def new():
        found = set(children.read_text().split()) - before
        return found and int(found.pop())

    return wait_until(new, 'a new master starts')


# ---- the log


def test_json_lines(tmp_path):
    """Each line is an object: of requests, of gunicorn, of a refused request."""
    began = datetime.now(UTC)
    with Server(tmp_path, PLANTS_LOG='json') as server:
        answer = server.ask(request(body=FERN, x_request_id='my-id'))
        server.ask(request('HEAD', '/livez', authorization=None), head=True)
        server.ask(request('GET', '/pl%0aants'))
        server.ask(b'GET / HTTP/9\r\n\r\n')
    lines = objects(server.log)
    [added] = [line for line in lines if line.get('request_id') == 'my-id']
    assert list(added) == [
        *('time', 'level', 'pid', 'logger', 'message', 'request_id', 'token', 'method'),
        *('path', 'status', 'error', 'duration_ms', 'bytes'),
    ]
    assert added.pop('pid') != server.pid
    assert 0 < added.pop('duration_ms') < 10_000
    assert re.fullmatch(r'[0-9-]{10}T[0-9:]{8}\.[0-9]{3}Z', added['time'])
    assert abs(datetime.fromisoformat(added.pop('time')) - began).seconds < 60
    assert added == {
        'level': 'INFO',
        'logger': 'plants',
        'message': 'request',
        'request_id': 'my-id',
        'token': 'token-1',
        'method': 'POST',
        'path': '/plants',
        'status': 200,
        'error': 0,
        'bytes': len(answer.body),
    }
    head = [line for line in lines if line.get('method') == 'HEAD'][-1]
    assert (head['token'], head['path'], head['bytes']) == ('-', '/livez', 0)
    [strange] = [line for line in lines if line.get('error') == 40400]
    assert strange['path'] == '/pl%0Aants'
    assert any('Starting gunicorn' in line['message'] for line in lines)
    assert any('request refused' in line['message'] for line in lines)


BROKEN_APPLICATION = f"""
from app import create_app
from store.memory import MemoryStore

class BrokenStore(MemoryStore):
    def add(self, plant):
        raise ZeroDivisionError('two\\nlines')

app = create_app(BrokenStore(), tokens=['{TOKEN}'])
"""


def test_json_traceback(tmp_path):
    """A traceback is a member of the one line that is about it."""
    (tmp_path / 'broken.py').write_text(BROKEN_APPLICATION)
    with Server(tmp_path, 'broken:app', PLANTS_LOG='json') as server:
        assert server.ask(request(body=FERN)).status == 500
    [line] = [line for line in objects(server.log) if 'exception' in line]
    assert line['level'] == 'ERROR'
    assert line['exception'].startswith('Traceback')
    assert line['exception'].endswith('ZeroDivisionError: two\nlines')


def test_text_lines(tmp_path):
    """A line for people has gunicorn's form, and the same facts in their order."""
    with Server(tmp_path) as server:
        answer = server.ask(request(body=FERN, x_request_id='my-id'))
    line = (
        r'\[[0-9-]{10} [0-9:]{8} [+-][0-9]{4}\] \[[0-9]+\] \[INFO\] '
        rf'my-id token-1 POST /plants 200 0 [0-9.]+ ms {len(answer.body)} bytes'
    )
    assert re.search(f'^{line}$', server.log, re.MULTILINE)


@LOGS
def test_no_secret_is_logged(tmp_path, log):
    """No token, body or query is logged, whatever they were mistaken for."""
    plants = tmp_path / 'plants.jsonl'
    with Server(tmp_path, '--log-level', 'debug', PLANTS_LOG=log) as server:
        for authorization in (f'Bearer {SECRET}', f'Basic {SECRET}', SECRET, None):
            for method in ('POST', 'GET', SECRET):
                server.ask(
                    request(
                        *(method, f'/plants?access_token={SECRET}', FERN),
                        authorization=authorization,
                        cookie=SECRET,
                        referer=f'http://x/?{SECRET}',
                        x_api_key=SECRET,
                        x_request_id=f'{SECRET}!',
                        origin=SECRET,
                        user_agent=SECRET,
                    )
                )
        for body in (SECRET, f'{{"id": 1, "name": {SECRET}', {SECRET: 1}, FERN):
            data = body.encode() if isinstance(body, str) else body
            for content_type in ('application/json', SECRET):
                server.ask(request(body=data, content_type=content_type))
        server.ask(request(body=FERN | {'name': 'another'}))
        plants.rename(tmp_path / 'away')
        assert server.ask(request(body=FERN)).status == 503
        (tmp_path / 'away').rename(plants)
        server.ask(f'POST {SECRET}'.encode() + b'\r\n' + request(body=FERN))
    # Where a client has put it as the method it is no secret.
    shown = [
        line
        for line in server.log.splitlines()
        if SECRET in line.replace(f' {SECRET} /plants', '').replace(f': "{SECRET}"', '')
    ]
    assert not shown
    assert TOKEN not in server.log


def test_json_access_log(tmp_path):
    """The access log is made of JSON lines too, and shows nothing that it knows."""
    with Server(tmp_path, '--access-logfile', '-', PLANTS_LOG='json') as server:
        server.ask(request(body=FERN))
    [line] = [
        line
        for line in objects(server.log)
        if line['logger'] == 'gunicorn.access' and '/plants' in line['message']
    ]
    assert line.keys() == {'time', 'level', 'pid', 'logger', 'message'}
    assert TOKEN not in server.log


@LOGS
def test_log_file_is_rotated(tmp_path, log):
    """A log file that was moved away is opened again at SIGUSR1, by every process."""
    path, moved = tmp_path / 'server.log', tmp_path / 'moved.log'
    arguments = ['--error-logfile', path.name, '--capture-output']
    with Server(tmp_path, *arguments, PLANTS_LOG=log) as server:
        with server.connect() as client:
            client.ask(request(body=FERN, x_request_id='before'))
            wait_until(lambda: 'before' in path.read_text(), 'it is logged')
            path.rename(moved)
            server.signal(signal.SIGUSR1)

            def logged():
                client.ask(request(body=FERN, x_request_id='after'))
                return path.exists() and 'after' in path.read_text()

            wait_until(logged, 'the worker writes to the new file')
        assert 'before' in moved.read_text()
        assert 'Handling signal: usr1' in moved.read_text()
        if log == 'json':
            objects(moved.read_text() + path.read_text())


# ---- start


def test_start_is_told_once(tmp_path):
    """A start tells address, store, tokens and workers, and workers do not."""
    with Server(tmp_path, workers=2) as server:
        port = server.port
        server.signal(signal.SIGHUP)
        wait_until(lambda: server.log.count('Booting') == 4, 'there are new workers')
    [block] = re.findall(r'ready\n((?:    .*\n)+)', server.log)
    assert [line.split() for line in block.splitlines()] == [
        ['address', f'http://127.0.0.1:{port}'],
        ['store', 'jsonl:plants.jsonl'],
        ['tokens', '1'],
        ['workers', '2'],
        ['page', f'http://127.0.0.1:{port}/docs'],
    ]


def test_start_is_told_in_json(tmp_path):
    """With JSON lines the start is one, and so is the token that was made."""
    listed = f'{TOKEN},{DIGEST}'
    with Server(tmp_path, PLANTS_LOG='json', PLANTS_TOKENS=listed) as server:
        port = server.port
    [line] = [x for x in objects(server.log) if x['message'].endswith('is ready')]
    assert (
        line
        | {
            'address': f'http://127.0.0.1:{port}',
            'store': 'jsonl:plants.jsonl',
            'tokens': 2,
            'workers': 1,
        }
        == line
    )
    with Server(tmp_path, PLANTS_LOG='json', PLANTS_TOKENS=None) as server:
        pass
    [line] = [x for x in objects(server.log) if 'No token' in x['message']]
    assert 'curl http://127.0.0.1' in line['message']


@LOGS
def test_refused_start(tmp_path, log):
    """A start that is refused is one line of the log."""
    server = Server(tmp_path, PLANTS_LOG=log, PLANTS_MAX_BODY='0')
    assert server.run() == 1
    *_, last = server.log.splitlines()
    if log == 'json':
        assert objects(server.log)[-1]['level'] == 'CRITICAL'
    assert "PLANTS_MAX_BODY: '0' is not a positive number" in last


def test_refused_start_with_a_log_file(tmp_path):
    """Who keeps the log in a file is told at the terminal, too."""
    server = Server(tmp_path, '--error-logfile', 'error.log', PLANTS_LOG='xml')
    assert server.run() == 1
    assert server.log == "Error: PLANTS_LOG: 'xml' is not text or json\n"
    assert "PLANTS_LOG: 'xml'" in (tmp_path / 'error.log').read_text()


# ---- check


def check(directory, *arguments, option='--check-config', **environment):
    """Check without a start; return the exit code and what is printed."""
    server = Server(directory, option, *arguments, **environment)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    code = server.run()
    after = {path: path.read_bytes() for path in directory.iterdir()}
    after.pop(directory / 'server.log')
    before.pop(directory / 'server.log', None)
    assert after == before, 'a check changes nothing'
    return code, server.log


@pytest.mark.parametrize('option', ['--check', '--check-config'])
def test_check(tmp_path, option):
    """A check says what a start would, makes nothing and prints no token."""
    told = {None: 'none configured, one will be made', TOKEN: '1'}
    for tokens, words in told.items():
        code, printed = check(tmp_path, option=option, PLANTS_TOKENS=tokens)
        assert code == 0
        assert [line.strip() for line in printed.splitlines()] == [
            'the plant store would start',
            'store    jsonl:plants.jsonl',
            f'tokens   {words}',
            'workers  1',
        ]


def test_check_in_json(tmp_path):
    """A check is told in JSON where the log is; settings may come with --env."""
    code, printed = check(tmp_path, '--env', 'PLANTS_LOG=json')
    assert code == 0
    [line] = objects(printed)
    assert (line['store'], line['workers']) == ('jsonl:plants.jsonl', 1)


def test_passwords_are_not_shown(tmp_path):
    """A check and a start show the store's URL without what may be a password."""
    settings = {'PLANTS_STORE': f'jsonl:.//me:{SECRET}@host'}
    assert 'store    jsonl:.//***@host' in check(tmp_path, **settings)[1]
    with Server(tmp_path, **settings) as server:
        pass
    assert 'store    jsonl:.//***@host' in server.log
    assert SECRET not in server.log


def test_check_beside_a_torn_file(tmp_path):
    """A check of a store with plants, and a torn tail, leaves all as it is."""
    (tmp_path / 'plants.jsonl').write_bytes(b'{"id":1,"name":"Fern"}\n{"id":')
    assert check(tmp_path)[0] == 0


BAD = {
    'setting': ({'PLANTS_METRICS': 'yes'}, "PLANTS_METRICS: 'yes' is not 0 or 1"),
    'origin': (
        {'PLANTS_CORS_ORIGINS': 'x'},
        "PLANTS_CORS_ORIGINS: 'x' is not an origin",
    ),
    'tokens file': (
        {'PLANTS_TOKENS': None, 'PLANTS_TOKENS_FILE': 'none'},
        'PLANTS_TOKENS_FILE: none: No such file',
    ),
    'directory': ({'PLANTS_STORE': 'jsonl:none/x'}, 'its directory does not exist'),
    'memory': (
        {'PLANTS_STORE': 'memory:', 'WEB_CONCURRENCY': '2'},
        'PLANTS_STORE: memory: needs one worker, not 2',
    ),
    'password': (
        {'PLANTS_STORE': f'nosql://me:{SECRET}@host/db'},
        "'nosql://***@host/db' is not a store",
    ),
}


@pytest.mark.parametrize(('environment', 'words'), BAD.values(), ids=BAD)
def test_failed_check(tmp_path, environment, words):
    """A check of what would not start ends with the sentence that a start has."""
    code, printed = check(tmp_path, **environment)
    assert (code, printed.count('\n')) == (1, 1)
    assert printed.startswith('Error: ')
    assert words in printed
    assert SECRET not in printed


def test_check_of_a_schema(tmp_path):
    """A check of a broken schema says which one it is."""
    for name in ROOMS:
        if name != 'schemas':
            (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / 'schemas').mkdir()
    for path in (REPOSITORY / 'schemas').glob('*.*'):
        (tmp_path / 'schemas' / path.name).write_bytes(path.read_bytes())
    (tmp_path / 'schemas' / 'NewPlant.json').write_text('{"type": 1}')
    command = [SCRIPTS / 'gunicorn', '--check-config']
    server = Server(tmp_path, command=command, PYTHONDONTWRITEBYTECODE='1')
    assert server.run() == 1
    assert server.log.startswith('Error: ')
    assert 'NewPlant.json' in server.log


def test_print_config(tmp_path):
    """The server prints its settings, and makes no token for it."""
    code, printed = check(tmp_path, option='--print-config', PLANTS_TOKENS=None)
    assert code == 0
    assert 'worker_class' in printed
    assert 'No token' not in printed


# ---- metrics


def counted(server, name='plants_request_seconds_count', **labels):
    """Return the sum of the samples that have a name and labels."""
    answer = server.ask(request('GET', '/metrics'))
    assert answer.status == 200
    return sum(
        sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def directory_of(pid):
    """Return the directory of the counters that a process has mapped."""
    found = re.search(
        r'(/\S*/plants-counters-[^/]+)/', Path(f'/proc/{pid}/maps').read_text()
    )
    return Path(found[1])


def add(server, first, number):
    """Add plants, each on a connection of its own, so that every worker has some."""
    for id in range(first, first + number):
        assert server.ask(request(body={'id': id, 'name': 'Fern'})).status == 200


def test_metrics_of_all_workers(tmp_path):
    """Every worker tells what all have counted, with the store's syncs."""
    with Server(tmp_path, workers=2, PLANTS_METRICS='1') as server:
        add(server, 1, 20)
        for _ in range(4):
            assert counted(server, route='/plants', status='200', error='0') == 20
        assert counted(server, 'plants_store_sync_seconds_count') == 20
        assert counted(server, 'plants_store_batch_plants_sum') == 20
        directory = directory_of(next(iter(server.worker_pids())))
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_metrics_outlive_workers(tmp_path):
    """A worker that was killed, and a reload, lose no count and leave no file."""
    with Server(tmp_path, workers=2, PLANTS_METRICS='1') as server:
        add(server, 1, 10)
        directory = directory_of(next(iter(server.worker_pids())))
        victim = max(server.worker_pids())
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(server.worker_pids() - {victim}) == 2, 'another starts')
        add(server, 11, 10)
        assert counted(server, route='/plants') == 20
        for _ in range(3):
            old = server.worker_pids()
            server.signal(signal.SIGHUP)
            wait_until(lambda old=old: not old & server.worker_pids(), 'all are new')
        add(server, 21, 10)
        assert counted(server, route='/plants') == 30
        assert len(list(directory.glob('*.db'))) <= 15
    assert not directory.exists()


def test_metrics_outlive_an_upgrade(tmp_path):
    """After SIGUSR2 both masters' workers tell everything, and the last one tidies."""
    with Server(tmp_path, command=SCRIPT, PLANTS_METRICS='1') as server:
        add(server, 1, 10)
        [worker] = server.worker_pids()
        directory = directory_of(worker)
        new = upgrade(server)
        try:
            wait_until(lambda: len(server.worker_pids()) == 2, 'a new worker starts')
            add(server, 11, 10)
            assert counted(server, route='/plants') == 20
            server.signal(signal.SIGTERM)
            server.wait()
            wait_until(lambda: 'promoted' in server.log, 'the new master takes over')
            add(server, 21, 10)
            assert counted(server, route='/plants') == 30
        finally:
            os.kill(new, signal.SIGTERM)
            wait_until(lambda: not is_alive(new), 'it ends')
    assert not directory.exists()


def test_metrics_after_a_failed_upgrade(tmp_path):
    """A new master that ends leaves the counters to the old one."""
    with Server(tmp_path, command=SCRIPT, PLANTS_METRICS='1') as server:
        add(server, 1, 10)
        new = upgrade(server)
        wait_until(lambda: len(server.worker_pids()) == 2, 'a new worker starts')
        os.kill(new, signal.SIGTERM)
        wait_until(lambda: not is_alive(new), 'it ends')
        assert counted(server, route='/plants') == 10
        directory = directory_of(min(server.worker_pids()))
    assert not directory.exists()


def test_foreign_directory_of_counters(tmp_path):
    """A directory that somebody else has set is neither used nor removed."""
    foreign = tmp_path / 'foreign'
    foreign.mkdir()
    for metrics in ('0', '1'):
        settings = {'PLANTS_METRICS': metrics, 'PROMETHEUS_MULTIPROC_DIR': str(foreign)}
        with Server(tmp_path, **settings) as server:
            add(server, 1, 1)
        assert list(foreign.iterdir()) == []


def test_metrics_of_another_server(tmp_path):
    """A server with one process counts in that process."""
    for name in ROOMS:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    command = [SCRIPTS / 'waitress-serve', '--listen=127.0.0.1:0', 'app:app']
    with Server(tmp_path, command=command, workers=None, PLANTS_METRICS='1') as server:
        add(server, 1, 3)
        assert counted(server, route='/plants') == 3


# ---- pages of other origins


def test_preflight(tmp_path):
    """A browser's questions are answered without a token, and errors can be read."""
    page = 'https://a.example'
    with Server(tmp_path, PLANTS_CORS_ORIGINS=page) as server:
        asked = {'origin': page, 'access_control_request_method': 'POST'}
        with server.connect() as client:
            client.send(request('OPTIONS', authorization=None, **asked))
            line = client._stream.readline()
            assert line == b'HTTP/1.1 204 No Content\r\n'
            assert client._headers()['access-control-allow-origin'] == page
            answer = client.ask(request(body={}, origin=page))
        assert (answer.status, answer.json['error']) == (400, 40005)
        assert answer.headers['access-control-allow-origin'] == page
