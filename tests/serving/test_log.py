"""The log: its two formats, its fields, and the secrets that it never shows."""

import json
import re
import shutil
import signal
import sys
from datetime import UTC, datetime
from urllib.parse import quote

import pytest
from server import GUNICORN, TOKEN, Server, request, wait_until

SECRET = 'a-secret-that-no-log-may-show'
FERN = {'id': 1, 'name': SECRET}

# Python writes ASCII, and a line before each of ours is broken: ours must be whole.
BROKEN = """
import logging
def post_worker_init(worker):
    log = logging.getLogger('plants').info
    worker.wsgi = lambda *args, to=worker.wsgi: log('%d', '') or to(*args)
"""
ASCII = {'LC_ALL': 'C', 'PYTHONIOENCODING': 'ascii', 'conf': [BROKEN]}
ASCII['command'] = sys.executable, '-X', 'utf8=0', *GUNICORN[1:]

each_format = pytest.mark.parametrize('log', ['text', 'json'])


def test_json_log_has_an_object_per_line(tmp_path):
    """Requests, refused requests, gunicorn's messages and access log are JSON."""
    (tmp_path / 'plants.jsonl').write_bytes(b'{"id":9,')  # a start cuts it off
    began = datetime.now(UTC)
    form = '"%(r)s" %({x-request-id}i)s'
    access = '--access-logfile', '-', '--access-logformat', form
    with Server(tmp_path, '--env', 'PLANTS_LOG=json', *access, TZ='JST-9') as server:
        answer = server.ask(request(body=FERN, x_request_id='my-id'))
        server.ask(b'GET / HTTP/9\r\n\r\n')
        server.ask(request('GET', '/pl%0aants'))
        wait_until(lambda: '"path": "/pl%0Aants"' in server.log, 'all is written')
    lines = [json.loads(line) for line in server.log.splitlines()]
    common = {'time', 'level', 'pid', 'logger', 'message'}
    assert all(common <= line.keys() for line in lines)
    [added] = [line for line in lines if line.get('request_id') == 'my-id']
    assert re.fullmatch(r'[0-9-]{10}T[0-9:]{8}\.[0-9]{3}Z', added['time'])
    assert abs(datetime.fromisoformat(added['time']) - began).seconds < 60
    assert 0 < added['duration_ms'] < 10_000
    expected = {'token': 'token-1', 'method': 'POST', 'path': '/plants', 'error': 0}
    assert added.items() >= (expected | {'bytes': len(answer.body)}).items()
    # Without gunicorn's fields, which hold the token.
    [access] = [line for line in lines if '"POST /plants' in line['message']]
    assert access.keys() == common
    assert access['message'].endswith(' my-id')


@each_format
def test_nothing_is_logged_that_does_harm(tmp_path, log):
    """No token, body or query, and no character that commands a terminal."""
    names = ('cookie', 'referer', 'x_api_key', 'origin', 'user_agent')
    headers = dict.fromkeys(names, SECRET) | {'x_request_id': f'{SECRET}!'}
    controls = ''.join(map(chr, {*range(1, 32), *range(0x7F, 0xA0)} - {10, 13}))
    access = tmp_path / 'access.log'
    arguments = '--log-level', 'debug', '--access-logfile', access.name
    with Server(tmp_path, *arguments, PLANTS_LOG=log, **ASCII) as server:
        for text in (f'Bearer {SECRET}', f'Basic {SECRET}', SECRET, None):
            headers['authorization'] = text
            server.ask(request('GET', f'/x?access_token={SECRET}', **headers))
            server.ask(request('POST', f'/plants?a={SECRET}', FERN, **headers))
        for body in (SECRET.encode(), b'{"name": ' + SECRET.encode(), {SECRET: 1}):
            server.ask(request(body=body))
        server.ask(request(body=FERN, content_type=SECRET))
        for name in (SECRET, 'another'):
            server.ask(request(body=FERN | {'name': name}))
        server.ask(f'POST {SECRET}\r\n'.encode() + request(body=FERN))
        for control in controls:
            agent = f'\xe4<{control}>'
            server.ask(request(body=FERN, user_agent=agent, x_request_id=agent))
        (tmp_path / 'plants.jsonl').unlink()
        assert server.ask(request(body=FERN)).status == 503
        server.ask(request('GET', f'/{quote(controls)}', x_request_id='last'))
        wait_until(lambda: ' last ' in server.log or '"last"' in server.log, 'logged')
    assert not re.search(f'{SECRET}|{TOKEN}', server.log)
    assert TOKEN not in access.read_text('utf-8')
    both = server.log + access.read_text('utf-8')
    assert not re.search('[\0-\t\x0b-\x1f\x7f-\x9f]', both)
    assert re.search(r'(\xe4|\\u00e4)<\\u009b>', both)


def test_log_file_is_rotated(tmp_path):
    """On SIGUSR1 every process opens it again; the last line is in it, too."""
    path, moved = tmp_path / 'server.log', tmp_path / 'moved.log'
    arguments = '--error-logfile', path.name, '--capture-output'
    how = ASCII | {'PLANTS_STORE': f'jsonl:{tmp_path}/\xe4'}
    sent = request(body=FERN, user_agent='\xe4')
    with Server(tmp_path, *arguments, '--access-logfile', path.name, **how) as server:

        def is_logged():
            assert server.ask(sent).status == 200
            text = path.read_text('utf-8') if path.exists() else ''
            return ' 200 0 ' in text and '"\xe4"' in text

        wait_until(is_logged, 'all is written')
        path.rename(moved)
        server.signal(signal.SIGUSR1)
        wait_until(is_logged, 'the worker writes to the new file')
        assert re.search('(?s) is ready; .*Handling signal: usr1', moved.read_text())
        assert server.ask(request(body=FERN, x_request_id='the-last')).status == 200
        server.signal(signal.SIGQUIT)
        assert server.wait() == 0
        assert 'the-last' in path.read_text()


def assert_goes_on(server):
    """Remove the directory of the log; check that it costs only lines of the log."""
    shutil.rmtree(server.directory / 'logs')
    for number in (signal.SIGUSR1, signal.SIGTTIN):  # Python handles them in order
        server.signal(number)
    wait_until(lambda: len(server.worker_pids()) > 1, 'it hears both')
    server.reload()
    assert server.ask(request(body=FERN)).status == 200


def test_log_configuration_keeps_its_rules(tmp_path):
    """Its handlers rotate and encode their files, and have lines of their level."""
    (tmp_path / 'logs').mkdir()
    kinds = {'errors': '', 'all': 'handlers.Rotating', 'watched': 'handlers.Watched'}
    handlers = {
        name: {'class': f'logging.{kind}FileHandler', 'filename': f'logs/{name}'}
        for name, kind in kinds.items()
    }
    handlers['errors']['level'], handlers['watched']['encoding'] = 'ERROR', 'ascii'
    handlers['all'] |= {'maxBytes': 1_000, 'backupCount': 1}
    handlers['console'] = {'class': 'logging.StreamHandler'}
    loggers = {'gunicorn.error': {'level': 'INFO', 'handlers': list(handlers)}}
    config = {'version': 1, 'handlers': handlers, 'loggers': loggers}
    how = {'conf': [f'logconfig_dict = {config}']}
    with Server(tmp_path, **how, PLANTS_STORE=f'jsonl:{tmp_path}/\xe4') as server:
        assert r'/\xe4 is ready' in (tmp_path / 'logs/watched').read_text()
        for _ in range(40):
            assert server.ask(request(body=FERN)).status == 200
        wait_until((tmp_path / 'logs/all.1').exists, 'it is rotated')
        assert (tmp_path / 'logs/errors').read_text() == ''
        assert_goes_on(server)
        wait_until(lambda: 'of the log are lost' in server.log, 'it is told')
    assert TOKEN not in server.log


@pytest.mark.parametrize('path', ['/dev/full', 'logs/log', '-'])
@pytest.mark.parametrize('kind', ['error', 'access'])
def test_log_that_cannot_be_written_costs_only_lines(tmp_path, kind, path):
    """On a full disk, also for errors, or without a directory, the server goes on."""
    (tmp_path / 'logs').mkdir()
    begin = 'Listening at: {server.LISTENERS[0]}\nBooting worker with pid: {worker.pid}'
    conf = [f'post_fork = lambda server, worker: print(f{begin!r}, flush=True)']
    conf += ['os.dup2(os.open("/dev/full", os.O_WRONLY), 2)'] * (path != '/dev/full')
    with Server(tmp_path, f'--{kind}-logfile', path, conf=conf) as server:
        assert_goes_on(server)
        (tmp_path / 'logs').mkdir()
        server.signal(signal.SIGUSR1)
        wait_until((tmp_path / path.strip('-')).exists, 'it is opened again')
    assert ('of the log are lost' in server.log) == (path == '/dev/full')
    assert TOKEN not in server.log
