"""The log: its two formats, its fields, and the secrets that it never shows."""

import json
import logging
import re
import shutil
import signal
import socket
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import quote

import gevent
import pytest
from exchange import fern, parse_json_log
from machine import child_pids, client_at
from server import PATIENCE, TOKEN, Server, request, wait_until
from waiting import in_threads

from serving.log import BatchingHandler

SECRET = 'a-secret-that-no-log-may-show'
FERN = {'id': 1, 'name': SECRET}

each_format = pytest.mark.parametrize('log', ['text', 'json'])


def test_json_log_has_an_object_per_line(tmp_path):
    """Requests, refused requests, gunicorn's messages and access log are JSON."""
    (tmp_path / 'plants.jsonl').write_bytes(b'{"id":9,')  # a start cuts it off
    began = datetime.now(UTC)
    more = {'PLANTS_LOG': 'json', 'TZ': 'JST-9'}
    form = '"%(r)s" %({x-request-id}i)s'
    access = '--access-logfile', '-', '--access-logformat', form
    with Server(tmp_path, *access, **more) as server:
        answer = server.ask(request(body=FERN, x_request_id='my-id'))
        server.ask(request('HEAD', '/livez', authorization=None), head=True)
        server.ask(request('GET', '/pl%0aants'))
        server.ask(b'GET / HTTP/9\r\n\r\n')
        server.ask(b'\x16\x03\x01\x00\x05\x01\r\n\r\n')  # as https:// begins
        wait_until(lambda: server.log.count('"error": 40000') == 2, 'all is written')
    lines = parse_json_log(server.log)
    [added] = [line for line in lines if line.get('request_id') == 'my-id']
    assert list(added) == [
        *('time', 'level', 'pid', 'logger', 'message', 'request_id', 'token', 'method'),
        *('path', 'status', 'error', 'duration_ms', 'bytes'),
    ]
    assert added.pop('pid') != server.pid
    assert 0 < added.pop('duration_ms') < 10_000
    assert re.fullmatch(r'[0-9-]{10}T[0-9:]{8}\.[0-9]{3}Z', added['time'])
    assert abs(datetime.fromisoformat(added.pop('time')) - began).seconds < 60
    assert list(added.values()) == [
        *('INFO', 'plants', 'request', 'my-id', 'token-1'),
        *('POST', '/plants', 200, 0, len(answer.body)),
    ]
    head = [line for line in lines if line.get('method') == 'HEAD'][-1]
    assert (head['token'], head['path'], head['bytes']) == ('-', '/livez', 0)
    [strange] = [line for line in lines if line.get('error') == 40400]
    assert strange['path'] == '/pl%0Aants'
    assert any('Starting gunicorn' in line['message'] for line in lines)
    plain, tls = [line['message'] for line in lines if 'refused: ' in line['message']]
    assert 'HTTPS to a port for HTTP?' not in plain
    assert 'HTTPS to a port for HTTP?' in tls
    # Without gunicorn's fields, which hold the token.
    [access] = [line for line in lines if '"POST /plants' in line['message']]
    assert access.keys() == {'time', 'level', 'pid', 'logger', 'message'}
    assert access['message'].endswith(' my-id')
    assert TOKEN not in server.log


def test_text_line_has_the_fields_of_a_json_line(service):
    """A text line has gunicorn's format, and the fields of JSON in their order."""
    answer = service.ask(request(body=fern(), x_request_id='my-id'))
    wait_until(lambda: 'my-id' in service.log, 'the line is written')
    line = (
        r'\[[0-9-]{10} [0-9:]{8} [+-][0-9]{4}\] \[[0-9]+\] \[INFO\] '
        rf'my-id token-1 POST /plants 200 0 [0-9.]+ ms {len(answer.body)} bytes'
    )
    assert re.search(f'^{line}$', service.log, re.MULTILINE)


@each_format
def test_no_secret_is_logged(tmp_path, log):
    """No token, body or query is logged, wherever in a request it was put."""
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
    # A client may send it as the method, which is logged.
    shown = [
        line
        for line in server.log.splitlines()
        if SECRET in line.replace(f' {SECRET} /plants', '').replace(f': "{SECRET}"', '')
    ]
    assert not shown
    assert TOKEN not in server.log


# What else prints in a worker, as a library may.
PRINTING = [
    'import sys',
    'def post_request(worker, req, environ, resp):',
    '    print(\'"stdout"\', flush=True)',
    '    print(\'"stderr"\', file=sys.stderr, flush=True)',
]


@each_format
def test_no_control_character_is_logged(tmp_path, log):
    """What a client sends cannot command a terminal, nor begin a line of its own."""
    controls = ''.join(map(chr, {*range(1, 32), *range(0x7F, 0xA0)} - {10, 13}))
    token_file = tmp_path / 'to\x1b\x9bkens'
    token_file.write_text(TOKEN)
    settings = {'PLANTS_LOG': log, 'PLANTS_TOKENS': None}
    settings['PLANTS_TOKENS_FILE'] = str(token_file)
    with Server(tmp_path, '--access-logfile', '-', **settings) as server:
        for name in ('user_agent', 'referer', 'x_request_id'):
            for control in controls:
                server.ask(request(body=FERN, **{name: f'<{control}>'}))
        server.ask(request('GET', f'/{quote(controls)}?{controls}'))
        token_file.write_text('')

        def refused():
            server.ask(request(body=FERN))
            return 'stay as they were' in server.log

        wait_until(refused, 'it is logged')
    assert not re.search('[\0-\t\x0b-\x1f\x7f-\x9f]', server.log)
    backslash = 2 * '\\' if log == 'json' else '\\'
    assert f'<{backslash}u009b>' in server.log


@each_format
def test_log_file_is_rotated(tmp_path, log):
    """On SIGUSR1 every process reopens a log file that was moved away."""
    path, moved = tmp_path / 'server.log', tmp_path / 'moved.log'
    arguments = ('--error-logfile', path.name, '--capture-output')
    with Server(tmp_path, *arguments, conf=PRINTING, PLANTS_LOG=log) as server:
        with server.connect() as client:
            client.ask(request(body=FERN, x_request_id='before'))
            wait_until(lambda: 'before' in path.read_text(), 'it is logged')
            path.rename(moved)
            server.signal(signal.SIGUSR1)

            def logged():
                client.ask(request(body=FERN, x_request_id='after'))
                text = path.read_text() if path.exists() else ''
                return all(x in text for x in ('after', '"stdout"\n', '"stderr"\n'))

            wait_until(logged, 'the worker writes to the new file')
        assert 'before' in moved.read_text()
        assert 'Handling signal: usr1' in moved.read_text()
        if log == 'json':
            lines = (moved.read_text() + path.read_text()).splitlines()
            parse_json_log('\n'.join(line for line in lines if line[0] == '{'))


@pytest.mark.parametrize('place', ['/dev/full', 'logs/log'])
def test_rotation_that_fails_costs_only_lines(tmp_path, place):
    """With a full disk, or no directory for the log, the server goes on."""
    (tmp_path / 'logs').mkdir()
    arguments = ('--error-logfile', place, '--bind', f'unix:{tmp_path}/s')
    arguments += ('--log-level', 'warning')

    def connected():
        with suppress(FileNotFoundError, ConnectionError):
            return client_at(tmp_path / 's')

    with (
        Server(tmp_path, *arguments).started() as server,
        wait_until(connected, 'it listens') as client,
    ):
        assert client.ask(request(body=FERN)).status == 200
        if place == 'logs/log':
            with connected() as other:
                other.ask(b'GET / HTTP/9\r\n\r\n')
            log = tmp_path / place
            wait_until(lambda: 'request refused' in log.read_text(), 'it is written')
            assert 'INFO' not in log.read_text()
        shutil.rmtree(tmp_path / 'logs')
        server.signal(signal.SIGUSR1)
        server.signal(signal.SIGTTIN)
        wait_until(lambda: len(child_pids(server.pid)) == 2, 'it has heard both')
        assert client.ask(request(body=FERN)).status == 200


def test_syslog_has_the_lines_of_requests(tmp_path):
    """What gunicorn sends to syslog includes the lines of requests."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as syslog:
        syslog.bind(('127.0.0.1', 0))
        syslog.settimeout(PATIENCE)
        place = f'udp://127.0.0.1:{syslog.getsockname()[1]}'
        with Server(tmp_path, '--log-syslog', '--log-syslog-to', place) as server:
            server.ask(request(body=FERN, x_request_id='my-id'))
            while b'my-id' not in syslog.recv(4096):
                pass


def test_formatter_of_a_log_config_is_used(tmp_path):
    """Lines of requests have the format of --log-config-json, with its thread."""
    form = '%(threadName)s [%(process)d] [%(levelname)s] %(message)s'
    file = tmp_path / 'log.json'
    file.write_text(json.dumps({'formatters': {'generic': {'format': form}}}))
    with Server(tmp_path, '--log-config-json', str(file)) as server:
        for id in 'my-id', 'another':
            server.ask(request(body=FERN, x_request_id=id))
            line = rf'(?m)^MainThread \[[0-9]+\] \[INFO\] {id} '
            wait_until(lambda line=line: re.search(line, server.log), 'it is written')
        assert server.log.count('my-id') == 1


def test_each_line_waits_for_a_batch(monkeypatch):
    """Lines of the loop's thread wait for more lines, also after the first batch."""
    target, written = logging.Handler(), []
    target.emit = written.append
    batching = BatchingHandler([target])
    batching.batch_with(gevent.get_hub().loop)
    line = logging.makeLogRecord({})
    for number in range(1, 3):
        monkeypatch.setattr('serving.log.BATCH_SECONDS', 3600)
        batching.emit(line)
        gevent.sleep(0.01)
        assert len(written) == 3 * (number - 1)
        in_threads(lambda: batching.emit(line))  # of another thread: at once
        assert len(written) == 3 * (number - 1) + 1
        batching.flush()
        monkeypatch.setattr('serving.log.BATCH_SECONDS', 0.001)
        batching.emit(line)
        wait_until(lambda n=number: gevent.sleep(0.001) or len(written) == 3 * n, 'one')
