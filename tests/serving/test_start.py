"""Startup: commands, refusals, checks, tokens, users and the startup message."""

import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from pwd import getpwnam

import pytest
from exchange import SECRET, assert_error, fern, parse_json_log, table
from machine import child_pids
from server import (
    GUNICORN,
    REPOSITORY,
    SCRIPTS,
    TOKEN,
    RawClient,
    Server,
    finished,
    free_port,
    is_alive,
    request,
    wait_until,
)

COMMANDS = {
    'gunicorn': [SCRIPTS / 'gunicorn'],
    'waitress-serve app:app': [
        *(SCRIPTS / 'waitress-serve', '--listen=127.0.0.1:0', 'app:app')
    ],
    'python app.py': [sys.executable, 'app.py'],
    'gunicorn app:app at several addresses, preloaded': [
        *(SCRIPTS / 'gunicorn', 'app:app', '--preload'),
        *('-b127.0.0.1:0', '-b[::1]:0', '-blocalhost:0'),
    ],
}


@table('command', COMMANDS)
def test_command_serves(checkout, command):
    """Every command that people type in a checkout serves."""
    plant = fern()
    with Server(checkout, command=command, workers=None) as server:
        assert server.ask(request(body=plant)).status == 200
        assert server.plants() == [plant]


def test_printed_curl_line_works(tmp_path):
    """Without a configured token one is generated, and the printed curl line works."""
    command = (sys.executable, REPOSITORY / 'app.py')  # from another directory
    settings = {'workers': 2, 'WEB_CONCURRENCY': '1', 'PLANTS_TOKENS': None}
    with Server(tmp_path, '-w2', command=command, **settings) as server:
        assert 'tokens   one, made by this start\n' in server.log
        [path] = map(Path, re.findall(r'in the file (.+)', server.log))
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text() not in server.log
        [line] = re.findall('^ *(curl .+)$', server.log, re.MULTILINE)
        for _ in range(4):
            done = finished(['bash', '-c', line])
            assert done.returncode == 0
            assert json.loads(done.stdout) == {'name': 'Fern', 'tag': 'shade'}
        assert server.plants() == [{'id': 1, 'name': 'Fern', 'tag': 'shade'}]
        assert_error(server.ask(request(body=fern(), authorization=None)), 40100)
        assert_error(server.ask(request(body=fern())), 40101)
        path.unlink()


TERMINAL = [sys.executable, '-c', 'import pty, sys; pty.spawn(sys.argv[1:])']
A_PIPE = ['sh', '-c', '"$@" 2>&1 | cat', 'sh']


@pytest.mark.parametrize(
    ('spawn', 'options'),
    [(TERMINAL, []), (TERMINAL, ['--capture-output']), (A_PIPE, [])],
    ids=['terminal', 'captured', 'pipe'],
)
def test_made_token_is_shown_on_the_terminal_and_not_logged(tmp_path, spawn, options):
    """A made token goes to the terminal or a pipe, and to no log file."""
    log = tmp_path / 'log'
    command = [*spawn, *GUNICORN, '-p', 'pid', '--log-file', 'log', *options]
    with Server(tmp_path, command=command, PLANTS_TOKENS=None).started() as server:
        wait_until(lambda: log.exists() and 'is ready' in log.read_text(), 'it serves')
        wait_until(lambda: 'PLANTS_TOKENS=' in server.log, 'it is shown')
        os.kill(int((tmp_path / 'pid').read_text()), signal.SIGTERM)
        assert server.wait() == 0
    [token] = re.findall('Bearer ([0-9a-f]{64})"', server.log)
    assert token not in log.read_text()


def assert_start_refused(server, *words):
    """Check that a start ends with just one sentence, and that it has these words."""
    assert server.run() == 1
    [sentence] = [line for line in server.log.splitlines() if '[INFO]' not in line]
    for word in words:
        assert word in sentence
    assert SECRET not in sentence


DAMAGED = b'{"id":1,"name":"Fern"}\n{"id":2,"na\n{"id":3,"name":"Moss"}\n'
# Bad settings of other kinds than those of test_every_fault_is_listed.
BAD_STARTS = {
    'memory: and two workers': (
        {'PLANTS_STORE': 'memory:', 'WEB_CONCURRENCY': '2'},
        ['PLANTS_STORE', 'memory:', 'one worker', '2'],
    ),
    'store in no directory': ({'PLANTS_STORE': 'jsonl:no/plants'}, ['no/plants']),
    'damaged file': ({'PLANTS_STORE': 'jsonl:damaged'}, ['line 2', 'check']),
    'path of a store': ({'PLANTS_STORE': 'p.jsonl'}, ['use jsonl:p.jsonl']),
    **{
        f'{option}, and a token of nobody': (
            {'GUNICORN_CMD_ARGS': f'{option} -b 127.0.0.1:0', 'PLANTS_TOKENS': None},
            ['nobody would see the token', 'PLANTS_TOKENS or PLANTS_TOKENS_FILE'],
        )
        for option in ('--preload', '--daemon')
    },
    **{
        f'certificate in {path}': (
            {'GUNICORN_CMD_ARGS': f'--certfile {path} -b 127.0.0.1:0'},
            [f'certfile, keyfile: {words}'],
        )
        for path, words in (
            ('/dev/zero', 'it is not a regular file'),
            (REPOSITORY / 'app.py', '[SSL'),
        )
    },
}


@table('environment, words', BAD_STARTS)
def test_bad_setting_stops_a_start_and_a_check(tmp_path, environment, words):
    """A start and a check end with a sentence that names the setting, and no file."""
    damaged = tmp_path / 'damaged'
    damaged.write_bytes(DAMAGED)
    for arguments in (['--check-config'], []):
        assert_start_refused(Server(tmp_path, *arguments, **environment), *words)
        assert {path.name for path in tmp_path.iterdir()} == {'damaged', 'server.log'}
        assert damaged.read_bytes() == DAMAGED


FAILING_RELOAD = "if '--check-config' not in sys.argv: on_reload = lambda server: 1 / 0"


def test_memory_store_keeps_one_worker(tmp_path):
    """SIGTTIN adds no worker, which would have plants of its own; a reload neither."""
    settings = {'workers': None, 'PLANTS_STORE': 'memory:', 'PLANTS_METRICS': '1'}
    with Server(tmp_path, conf=[FAILING_RELOAD], **settings) as server:
        plant = fern()
        assert server.ask(request(body=plant)).status == 200
        assert 'ERROR' not in server.log
        before = server.worker_pids()
        assert len(before) == 1, 'however many cores there are'
        server.signal(signal.SIGHUP)
        wait_until(lambda: 'ZeroDivisionError' in server.log, 'it is undone')
        server.signal(signal.SIGTTIN)
        refusal = 'memory: needs one worker, not 2'
        wait_until(lambda: refusal in server.log, refusal)
        server.signal(signal.SIGUSR1)  # signals are handled one after the other
        wait_until(lambda: 'signal: usr1' in server.log, 'the other is over')
        assert child_pids(server.pid) == before
        assert_error(server.ask(request(body=plant | {'name': 'Moss'})), 40006)


def test_startup_message_is_logged_once(tmp_path):
    """A start says what it serves, once; it writes nothing into the home directory."""
    home = tmp_path / 'home'
    home.mkdir()
    settings = {'HOME': str(home), 'TMPDIR': str(home), 'XDG_RUNTIME_DIR': None}
    with Server(tmp_path, workers=2, **settings) as server:
        port = server.port
        links = Path(f'/proc/{min(server.worker_pids())}/fd').iterdir()
        assert any('/dev/shm/wgunicorn-' in os.readlink(link) for link in links)
        server.reload()
        assert list(home.iterdir()) == []
    [block] = re.findall(r'ready\n((?:    .*\n)+)', server.log)
    assert [line.split() for line in block.splitlines()] == [
        ['address', f'http://127.0.0.1:{port}'],
        ['store', f'jsonl:{tmp_path}/plants.jsonl'],
        ['tokens', '1'],
        ['workers', '2'],
        ['page', f'http://127.0.0.1:{port}/docs'],
    ]


def test_refused_start_is_in_the_log_and_on_the_terminal(tmp_path):
    """A refusal is an object of a log in JSON; beside a log file it is printed, too."""
    reason = "PLANTS_MAX_BODY: '0' is not a positive number"
    server = Server(tmp_path, '--env', 'PLANTS_LOG=json', PLANTS_MAX_BODY='0')
    assert server.run() == 1
    last = parse_json_log(server.log)[-1]
    assert last['level'] == 'CRITICAL'
    assert reason in last['message']
    server = Server(tmp_path, '--error-logfile', 'error.log', PLANTS_MAX_BODY='0')
    assert server.run() == 1
    assert server.log.startswith(f'Error: {reason}')
    assert reason in (tmp_path / 'error.log').read_text()


def check(directory, *arguments, option='--check-config', **environment):
    """Run a check, which must change no file; return its exit code and output."""
    server = Server(directory, option, *arguments, **environment)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    code = server.run()
    after = {path: path.read_bytes() for path in directory.iterdir()}
    after.pop(directory / 'server.log')
    before.pop(directory / 'server.log', None)
    assert after == before, 'a check changes nothing'
    return code, server.log


@pytest.mark.parametrize('option', ['--check', '--check-config'])
def test_check_prints_what_a_start_would_use(tmp_path, option):
    """A check prints what a start would use; it changes no file and shows no token."""
    expected = {None: 'none configured: a start makes one', TOKEN: '1'}
    for tokens, words in expected.items():
        if tokens:  # with a torn file, which a start would cut
            plants = tmp_path / 'plants.jsonl'
            plants.write_bytes(b'{"id":1,"name":"Fern"}\n{"id":')
        code, printed = check(tmp_path, option=option, PLANTS_TOKENS=tokens)
        assert code == 0
        assert [line.strip() for line in printed.splitlines()] == [
            'the plant store would start',
            f'store    jsonl:{tmp_path}/plants.jsonl',
            f'tokens   {words}',
            'workers  1',
        ]


def test_passwords_are_not_shown(tmp_path):
    """A check and a start show the URL without a password; settings have no token."""
    code, printed = check(tmp_path, option='--print-config', PLANTS_TOKENS=None)
    assert code == 0
    assert re.search(r'(?m)^http_parser += python$', printed)
    assert 'No token' not in printed
    secrets = ['--env', f'PLANTS_TOKENS={TOKEN}', '--env', f'PGPASSWORD={SECRET}']
    code, printed = check(tmp_path, '--print-config', *secrets, PLANTS_TOKENS=None)
    assert (code, "['PLANTS_TOKENS=***', 'PGPASSWORD=***']" in printed) == (0, True)
    _, refused = check(tmp_path, '--env', f'PLANTS_TOKENS:{SECRET}')
    assert "raw_env: environment setting '***' invalid" in refused
    debug = [*secrets, '--log-level', 'debug']
    with Server(tmp_path, *debug, PLANTS_TOKENS=None) as server:
        assert server.ask(request(body=fern())).status == 200
        server.reload()
    assert server.log.count("raw_env: ['PLANTS_TOKENS=***'") == 2
    for text in printed, refused, server.log:
        assert TOKEN not in text
        assert SECRET not in text
    sentence = 'Error: PLANTS_STORE: jsonl: it is not a path'
    url = f'jsonl:.//me:{SECRET}@host'
    # A check uses the variables that --env sets.
    assert sentence in check(tmp_path, '--env', f'PLANTS_STORE={url}')[1]
    server = Server(tmp_path, PLANTS_STORE=url)
    assert server.run() == 1
    assert sentence.removeprefix('Error: ') in server.log
    assert SECRET not in server.log


def test_every_fault_is_listed(service, checkout):
    """A check and a start list all faults, a line each, those of the addresses last."""
    plants = checkout / 'plants.jsonl'
    plants.write_bytes(DAMAGED)
    (checkout / 'schemas/Plant.json').write_text('true')
    (checkout / 'log').symlink_to('no/log')
    os.mkfifo(checkout / 'fifo')
    taken = f'127.0.0.1:{service.port}'
    faults = [
        "PLANTS_LOG: 'x' is not text or json",
        'PLANTS_TOKEN: there is no such setting; the nearest one is PLANTS_TOKENS',
        'workers: 0 is too few: nobody would answer a request',
        "worker_class: class uri 'no.Worker'",
        'logger_class: statsd_host needs gunicorn.instrument.statsd.Statsd',
        f'errorlog: {checkout}/no: it is not a directory that can be written to',
        f'accesslog: {checkout}/fifo: No such device',
        'pidfile: no: it is not a directory',
        'worker_tmp_dir: no: it is not a directory',
        f'schemas: {checkout}/schemas/Plant.json: true is not an object',
        'certfile, keyfile: no: No such file or directory',
        f'PLANTS_STORE: {plants}: line 2 (byte 23) is damaged',
        f'bind: {taken}: Address already in use (use another one: gunicorn -b ',
        'bind: :80800: bind(): port must be 0-65535',
        'bind: unix:no/s: ',
        'bind: unix:app.py: the path exists, and is not a socket',
    ]
    arguments = ('-b', taken, '-b', ':80800', '-b', 'unix:no/s', '-b', 'unix:app.py')
    arguments += ('-k', 'no.Worker', '--access-logfile', 'fifo')
    arguments += ('--certfile', 'no', '--worker-tmp-dir', 'no', '-p', 'no/pid')
    arguments += ('--error-logfile', 'log', '--statsd-host', 'localhost:8125')
    settings = {'PLANTS_TOKEN': SECRET, 'PLANTS_LOG': 'x', 'WEB_CONCURRENCY': '0'}
    for option in ('--check-config', '--no-sendfile'):
        command = [*GUNICORN[:3], option, *arguments]
        server = Server(checkout, command=command, GUNICORN_CMD_ARGS=None, **settings)
        assert server.run() == 1
        lines = zip(faults, server.log.splitlines(), strict=True)
        for fault, line in lines:
            assert line.startswith(f'Error: {fault}')
        assert plants.read_bytes() == DAMAGED
    assert service.ask(request(body=fern())).status == 200


def test_daemon_serves_until_sigterm(tmp_path):
    """--daemon leaves the terminal, logs to its file and ends at SIGTERM."""
    arguments = ('--daemon', '-p', 'pid', '--error-logfile', 'error.log')
    server = Server(tmp_path, *arguments)
    server.start()
    # Not run(), which would kill what has not left the process group yet.
    assert server.wait() == 0
    assert server.log == ''
    log, pid = tmp_path / 'error.log', tmp_path / 'pid'
    wait_until(lambda: log.exists() and 'Booting worker' in log.read_text(), 'it runs')
    number = int(pid.read_text())
    try:
        port = int(re.search(r'http://127.0.0.1:(\d+)', log.read_text())[1])
        with RawClient(port) as client:
            assert client.ask(request(body=fern())).status == 200
    finally:
        os.kill(number, signal.SIGTERM)
        wait_until(lambda: not is_alive(number), 'it ends')


def test_pid_file_of_a_running_server_is_refused(tmp_path):
    """A start with the pid file of another server is refused; its reload is not."""
    (tmp_path / 'other').mkdir()
    pid = tmp_path / 'pid'
    address = f'--bind 127.0.0.1:{free_port()}'
    with Server(tmp_path, '-p', pid, GUNICORN_CMD_ARGS=address) as server:
        other = Server(tmp_path / 'other', '--check-config', '-p', pid)
        assert_start_refused(other, f'pidfile: {pid}: process {server.pid} is running')
        server.reload()
        # systemd has the address, too, and hands its socket over.
        settings = {'GUNICORN_CMD_ARGS': address, 'LISTEN_FDS': '1'}
        other = Server(tmp_path / 'other', '--check-config', **settings)
        assert other.run() == 0
        assert pid.read_text() == f'{server.pid}\n'
        with server.connect() as client:
            assert client.ask(request('GET', connection='close')).announces_close
            assert client.receive() is None, 'it closes first'
    settings = {'GUNICORN_CMD_ARGS': address}  # of which the kernel still remembers
    assert Server(tmp_path, '--check-config', **settings).run() == 0
    os.mkfifo(tmp_path / 'fifo')
    other = Server(tmp_path, '--check-config', '-p', 'fifo', **settings)
    assert_start_refused(other, 'pidfile: it is not a regular file')


ADDRESSES = {
    'a socket for each worker': (
        ['--reuse-port', '--bind', '127.0.0.1:0'],
        'address  http://127.0.0.1:0\n',
    ),
    'unix socket': (['--bind', 'unix:s'], 'http://HOST:PORT/plants'),
    'both': (['--reuse-port', '--bind', 'unix:s'], 'address  unix:s\n'),
}


@table('arguments, words', ADDRESSES)
def test_configured_address_is_named(tmp_path, arguments, words):
    """The message names the configured address, and a page if a browser can open it."""
    with Server(tmp_path, *arguments, PLANTS_TOKENS=None).started() as server:
        wait_until(lambda: 'Booting worker' in server.log, 'it starts')
        assert words in server.log
        assert ('/docs' in server.log) == ('unix:s' not in arguments)


@pytest.fixture
def public():
    """A directory that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason='only root may serve as another user')
@pytest.mark.parametrize('text', [None, b'{"id":-1,"name":"Fern"}\n{"id":'])
def test_user_that_serves_owns_the_files(public, text):
    """With --user the plant file, and every file beside it, belongs to that user."""
    nobody = getpwnam('nobody')
    os.chown(public, nobody.pw_uid, nobody.pw_gid)
    if text is not None:  # it has a torn tail, which is kept in a side file
        (public / 'plants.jsonl').write_bytes(text)
        os.chown(public / 'plants.jsonl', nobody.pw_uid, nobody.pw_gid)
    user = ('--user', 'nobody', '--group', str(nobody.pw_gid))
    assert 'Permission denied' in check(public, *user, '--certfile', '/etc/shadow')[1]
    with Server(public, *user, workers=2, PLANTS_METRICS='1') as server:
        assert server.ask(request(body=fern())).status == 200
        if text is None:
            server.reload()
        assert server.ask(request('GET', '/readyz')).status == 200
        assert server.ask(request(body=fern())).status == 200
        assert server.ask(request('GET', '/metrics')).status == 200
        files = [path for path in public.iterdir() if path.name != 'server.log']
        assert len(files) >= 2
        assert {path.owner() for path in files} == {'nobody'}
        status = Path(f'/proc/{server.pid}/status').read_text()
        assert 'Gid:\t0\t0\t0\t0\n' in status


OTHER_APP = """
def application(environ, start_response):
    start_response('200 OK', [('Content-Length', '5')])
    return [b'other']
"""


@pytest.mark.parametrize('option', ['--preload', '--keep-alive=5'])
def test_other_application_is_served_without_plants(tmp_path, option):
    """Another application is served without our log lines, token or plant file."""
    (tmp_path / 'other.py').write_text(OTHER_APP)
    arguments = ('other:application', option)
    with Server(tmp_path, *arguments, workers=None, PLANTS_TOKENS=None) as server:
        assert server.ask(request('GET')).body == b'other'
        server.reload()
        assert server.ask(request('GET')).body == b'other'
        for word in ('plant', 'oken', 'curl'):
            assert word not in server.log
    names = {path.name for path in tmp_path.iterdir()} - {'__pycache__'}
    assert names == {'other.py', 'server.log'}
