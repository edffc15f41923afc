"""Startup: commands, refusals, checks, tokens, users and process 1."""

import json
import os
import re
import signal
import socket
import tempfile
from pathlib import Path
from pwd import getpwnam

import pytest
from exchange import SECRET, fern, table
from gunicorn.config import KNOWN_SETTINGS
from rawclient import request
from server import GUNICORN, Server, finished, free_port, in_namespace, make_certificate
from waiting import PATIENCE, wait_until

from serving import lifecycle


def add_as_printed(server):
    """Add a plant with the command that a start has printed."""
    [line] = re.findall('curl .+', server.log)
    command = ['bash', '-c', f'{line} -sS --max-time 20']
    done = finished(command, cwd=server.directory)
    assert json.loads(done.stdout)['name'], done


def test_made_token_works_and_stays(tmp_path):
    """A token is made if none is configured, printed once, and survives a reload."""
    how = {OPTIONS: '--bind "unix:a b.sock"', 'PLANTS_TOKENS': None}
    with Server(tmp_path, workers=2, **how).started() as server:
        wait_until(lambda: len(server.worker_pids()) == 2)
        add_as_printed(server)
        server.reload()
        add_as_printed(server)
    assert Server(tmp_path, '--check-config', '--daemon', PLANTS_TOKENS=None).run() == 1
    assert Server(tmp_path, 'app:app').run() == 1  # not what our hooks load and close


OPTIONS = 'GUNICORN_CMD_ARGS'
DAMAGED = b'{"id":1,"name":"Fern"}\n{"id":2,"na\n{"id":3,"name":"Moss"}\n'
TAKEN = '-b 127.0.0.1:{} -b 127.0.0.1:65536 -b unix:taken -b unix:a/b -b unix:damaged'
WRONG = {'PLANTS_MAX_BODY': '0', 'PLANTS_STORE': f'sql:{SECRET}'}
WRONG, OWN = WRONG | {OPTIONS: '--env PLANTS_LOG=x'}, {OPTIONS: '--reuse-port'}
IDLE = '--reload --proxy-protocol --limit-request-fields=9 --statsd-host=:1 --keyfile=k'
NAMES = [word.replace('-', '_') for word in re.findall(r'--([a-z-]+)', IDLE)]
SYSTEMD = {'LISTEN_FDS': '', 'LISTEN_PID': 'x'}
# Variables, a text for each fault, and the exit code of a check, which opens nothing.
REFUSED = {
    'ours': (WRONG, ['PLANTS_LOG', 'PLANTS_MAX_BODY', 'PLANTS_STORE'], 1),
    'of gunicorn': ({OPTIONS: f'-w 0 {IDLE}'}, ['workers', *NAMES], 1),
    'log': ({OPTIONS: '--log-level x --log-config-json x'}, ['loglevel', 'logcon'], 1),
    'systemd': (OWN | SYSTEMD, [*SYSTEMD, 'reuse_port'], 1),
    'TLS': ({OPTIONS: '-b :0 --certfile no --ca-certs no'}, ['keyfile, ca_certs'], 1),
    'workers': ({'WEB_CONCURRENCY': '2'}, ['memory:'], 1),
    'damaged file': ({'PLANTS_STORE': 'jsonl:damaged'}, ['line 2'], 0),
    'addresses': ({OPTIONS: TAKEN}, ['already', '65535', 'taken', 'a/b', 'damaged'], 0),
    'own': ({OPTIONS: f'{TAKEN} {OWN[OPTIONS]}'}, ['already', '65535', 'taken'], 0),
}


@table('variables, words, code', REFUSED)
def test_refused_start_leaves_nothing(service, tmp_path, variables, words, code):
    """Each fault is a sentence; the exit code is 1, and no file is left or changed."""
    (tmp_path / 'damaged').write_bytes(DAMAGED)
    conf = ['import warnings', 'warnings.simplefilter("ignore")']  # unclosed sockets
    how = {'conf': conf, 'PLANTS_STORE': 'memory:'}
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / 'taken'))
        how |= {name: text.format(service.port) for name, text in variables.items()}
        for argument, expected in {'--check-config': code, '-ppid': 1}.items():
            server = Server(tmp_path, argument, **how)
            assert server.run() == expected
            said = [word for word in words if word in server.log]
            assert said == words[: expected * len(words)]
            assert not re.search(f'Traceback|{SECRET}', server.log)
            left = {it.name for it in tmp_path.iterdir()} - {'__pycache__'}  # bytecode
            assert left == {'server.log', 'damaged', 'more.conf.py', 'taken'}
            assert (tmp_path / 'damaged').read_bytes() == DAMAGED


def test_memory_store_keeps_one_worker(tmp_path):
    """However many cores there are; no signal makes another one, or another store."""
    conf = ['from serving import lifecycle', "lifecycle.GUNICORN = 'another'"]
    with Server(tmp_path, workers=None, conf=conf, PLANTS_STORE='memory:\r') as server:
        assert 'is not another' in server.log
        [worker] = server.worker_pids()
        for number in (signal.SIGHUP, signal.SIGUSR2):  # as ``pkill`` sends them
            os.killpg(server.pid, number)
        server.signal(signal.SIGTTIN)
        wait_until(lambda: server.log.count('PLANTS_STORE: memory: needs') == 3)
        assert server.ask(request(body=fern())).status == 200
        assert server.worker_pids() == {worker}


# A plant file that takes long to read.
LOOP = '    while True: time.sleep(0.01)'  # a long sleep may begin after the signal
SLOW = ['import time', 'from store.jsonl import JSONLinesStore', 'def load(self):']
SLOW += ['    print("loading", flush=True)', LOOP, 'JSONLinesStore.load = load']
FORKED = ['import time', 'def post_fork(server, worker):', LOOP]
UNSHARE = ['--pid', '--fork', '--kill-child', '--mount-proc']
MOMENTS = {
    'reading': (SLOW, UNSHARE, signal.SIGTERM),
    'forked': (FORKED, [], signal.SIGINT),
    'serving': (['reuse_port = True'], UNSHARE, signal.SIGTERM),
}


@table('conf, container, number', MOMENTS)
def test_signal_ends_a_server_at_any_time(tmp_path, container, conf, number):
    """Also in a long read, before a worker has handlers, and as process 1."""
    command = [*(container and in_namespace(*container)), *GUNICORN, '-p', 'pid']
    with Server(tmp_path, command=command, conf=conf).started() as server:
        word = 'loading' if conf == SLOW else 'Booting worker'
        wait_until(lambda: word in server.log, 'it has begun')
        pid = server.pid
        if container:
            pid = int(finished(['pgrep', '-P', str(pid)]).stdout)
        os.kill(pid, number)
        assert server.wait(20) == 0
        assert not (tmp_path / 'pid').exists()
        assert 'Traceback' not in server.log


# libpq looks there for certificates, and without it in the home of its user.
HOME = ['post_fork = lambda s, w: print("HOME", os.environ.get("HOME"), flush=True)']


@pytest.mark.skipif(os.geteuid() != 0, reason='only root may serve as another user')
def test_user_that_serves_owns_the_files():
    """With --user files belong to that user, who must be able to read the others."""
    nobody, token = getpwnam('nobody'), 'm' * 30
    user = ('--user', 'nobody', '--group', str(nobody.pw_gid))
    metrics = request('GET', '/metrics', authorization=f'Bearer {token}')
    with tempfile.TemporaryDirectory() as name:
        public = Path(name)
        os.chown(public, nobody.pw_uid, nobody.pw_gid)
        make_certificate(public)
        (public / 'plants.key').chmod(0o600)
        (public / 'tokens').write_text('m' * 31)
        (public / 'tokens').chmod(0o600)
        tls = ('--certfile', 'plants.pem', '--keyfile', 'plants.key')
        assert Server(public, *user, *tls).run() == 1
        how = {'PLANTS_TOKENS': None, 'PLANTS_TOKENS_FILE': 'tokens'}
        assert Server(public, *user, **how).run() == 1
        how = {'conf': HOME, 'HOME': '/root', 'PLANTS_METRICS_TOKEN': token}
        with Server(public, *user, '--error-logfile=server.log', **how) as server:
            for _ in range(2):
                assert server.ask(request(body=fern())).status == 200
                assert server.ask(metrics).status == 200
                server.reload()
            assert server.log.count('HOME None') == 3
            assert (public / 'plants.jsonl').stat()[4:6] == nobody[2:4]  # uid, gid
            (public / 'server.log').rename(public / 'moved.log')
            server.signal(signal.SIGUSR1)
            wait_until((public / 'server.log').exists)
            wait_until(lambda: server.ask(metrics) and ' /metrics 200 ' in server.log)


def test_port_is_served_on_all_addresses(tmp_path):
    """IPv4, and IPv6 where there is any; also where each worker has its own sockets."""
    port = free_port()
    how = {OPTIONS: None, 'PORT': str(port), 'PLANTS_TOKENS': None}
    own = ['reuse_port = True', 'from serving import worker', 'worker.LEAVE = 3600']
    for conf in (), own:
        with Server(tmp_path, conf=conf, workers=2, **how) as server:
            assert server.port == port
            add_as_printed(server)
            if socket.has_dualstack_ipv6():
                with socket.create_connection(('::1', port), PATIENCE) as client:
                    client.sendall(request('GET', '/livez'))
                    assert b' 200 ' in client.recv(100)


def test_settings_of_gunicorn_have_an_effect():
    """Or they are refused. What is new in another gunicorn must be looked at."""
    # Three regulate what is not here: forwarded_allow_ips, secure_scheme_headers and
    # sendfile. And proc_name is for syslog, and for setproctitle if it is installed.
    others = [s for s in KNOWN_SETTINGS if not re.match(lifecycle.NO_EFFECT, s.name)]
    assert (len(others), len(KNOWN_SETTINGS)) == (69, 120)
