"""Reloads (SIGHUP): they happen whole or not at all, and the process id stays."""

import os
import pty
import re
import signal
import sys

import pytest
from exchange import Load, assert_error, fern
from machine import edit, kib, locked
from rawclient import TOKEN
from server import GUNICORN, Server, is_alive, request, wait_until

PROBE = request('GET', '/livez')
IN_PLACE = GUNICORN[:3]  # with the configuration of its directory


def replace_worker(server):
    """Kill a worker, and wait until there is another one."""
    old = server.worker_pids()
    os.kill(min(old), signal.SIGKILL)
    wait_until(lambda: len(server.worker_pids() - old) == 1, 'another one starts')


def test_reload_reads_settings_and_schemas(checkout):
    """New workers have the settings and schemas as they are now."""
    settings = checkout / 'gunicorn.conf.py'
    variable = "raw_env = ['PLANTS_MAX_BODY=10', 'A=1']\n"
    variable += "on_reload = lambda server: os.environ['A']\n"
    more = 'workers = 2\nPath(__file__).unlink()  # read once\n'
    more += 'print("A is", os.environ.get("A"), flush=True)\n'
    stays = "if not hasattr(sys, 'once'):  # as a module that is imported once\n"
    stays += f"    sys.once = os.environ['PLANTS_TOKENS'] = {TOKEN!r}\n"
    settings.write_text(settings.read_text() + stays + variable)
    how = {'PLANTS_TOKENS': None, 'PLANTS_MAX_BODY': '60'}
    with Server(checkout, command=IN_PLACE, **how) as server:
        server.reload()
        assert_error(server.ask(request(body=fern())), 40003)
        edit(settings, variable, '')
        server.reload()
        edit(settings, stays, stays + more)
        edit(checkout / 'schemas/Plant.json', '"examples": ["Fern"]', '"maxLength": 4')
        server.reload()
        wait_until(lambda: len(server.worker_pids()) == 2, 'there is one more')
        assert 'A is None' in server.log
        assert server.ask(request(body=fern())).status == 200
        assert_error(server.ask(request(body=fern(name='Ferns'))), 40005)
        assert_error(server.ask(request(body=b' ' * 61)), 40003)


FIXED = {'bind': '127.0.0.1:1', 'reuse_port': True, 'user': 1, 'group': 1}
FIXED |= {'pidfile': 'new.pid', 'worker_class': 'gthread', 'backlog': 1, 'umask': 1}
# A line at the end of gunicorn.conf.py, and what the log then names.
REFUSED = {
    **{name: (f'{name} = {value!r}', name) for name, value in FIXED.items()},
    'syntax': ('keepalive =', 'gunicorn.conf.py'),
    'value': ("keepalive = 'long'", 'keepalive'),
    'heartbeats': ("worker_tmp_dir = os.environ['SCRIPT_NAME'] = '/proc'", '/proc'),
    'setting of ours': ("chdir = '/'\nraw_env += ['PLANTS_LOG=x']", 'PLANTS_LOG'),
    'store in memory': ("raw_env += ['PLANTS_STORE=memory:']", 'memory:'),
    'store': ("raw_env += ['PLANTS_STORE=jsonl:no/plants']", 'no/plants'),
    'no token any more': ('raw_env = []', 'PLANTS_TOKENS'),
}


def refusal(server):
    """Reload, and return the line that says why that was refused."""
    before = len(server.log)
    server.signal(signal.SIGHUP)
    search = re.compile('.*Not reloaded.*').search
    line = wait_until(lambda: search(server.log, before), 'it is refused', 20)[0]
    assert 'Traceback' not in server.log[before:]
    return line


def test_reload_that_would_fail_changes_nothing(checkout, subtests):
    """What new workers could not start with is refused, until it is corrected."""
    settings = checkout / 'gunicorn.conf.py'
    bound = "bind, pidfile = '127.0.0.1:0', 'run/pid'"
    ours = f"{settings.read_text()}\n{bound}\nraw_env = ['PLANTS_TOKENS={TOKEN}']\n"
    settings.write_text(ours)
    (checkout / 'run').mkdir()
    how = {'PLANTS_TOKENS': None, 'GUNICORN_CMD_ARGS': None, '': 'without a name'}
    with Server(checkout, command=('env', *IN_PLACE), **how) as server:
        workers = server.worker_pids()
        for name, (line, words) in REFUSED.items():
            settings.write_text(f'{ours}{line}\n')
            with subtests.test(name):
                assert words in refusal(server)
                assert server.worker_pids() == workers
                assert server.ask(request(body=fern())).status == 200
                if sys.platform == 'linux':
                    assert os.readlink(f'/proc/{server.pid}/cwd') == str(checkout)
        settings.write_text(ours)
        sound = (schema := checkout / 'schemas/Plant.json').read_text()
        schema.write_text('{"type": ["obj')
        assert 'Plant.json' in refusal(server)
        replace_worker(server)  # it serves what the others serve
        assert server.ask(request(body=fern())).status == 200
        schema.write_text(sound)
        server.reload()
        assert server.ask(request(body=fern())).status == 200


def test_new_worker_has_what_the_others_have(tmp_path):
    """It needs neither the certificate, which may be half written, nor the lock."""
    with Server(tmp_path, is_tls=True) as server:
        (tmp_path / 'plants.pem').write_text('')
        with locked(tmp_path / 'plants.jsonl'):
            warnings = server.log.count('WARNING')
            replace_worker(server)
            assert server.log.count('WARNING') == warnings  # no wait has ended in vain
            assert server.ask(PROBE).status == 200
        assert server.ask(request(body=fern())).status == 200
        assert 'certfile' in refusal(server)


def test_reload_reads_a_replaced_plant_file(tmp_path):
    """A file in its place is refused until then; a reload that fails takes none."""
    path, new = tmp_path / 'plants.jsonl', tmp_path / 'new'
    with Server(tmp_path, workers=2) as server:
        assert server.ask(request(body=fern())).status == 200
        for damaged in (None, '{"id":\n{"id":1,"name":"Moss"}\n'):
            path.unlink() if damaged is None else path.write_text(damaged)
            assert str(path) in refusal(server)
            assert path.exists() == (damaged is not None)
        new.write_text('{"id":-7,"name":"Moss"}\n')
        new.rename(path)
        replace_worker(server)
        for _ in range(10):
            assert_error(server.ask(request(body=fern())), 50300)
        server.reload()
        assert_error(server.ask(request(body=fern(id=-7))), 40006)


def test_no_request_fails_while_workers_are_replaced(tmp_path):
    """By reloads, or as each has answered enough; the process id stays."""
    with Server(tmp_path, '--max-requests=300', workers=2) as server:
        with Load(server) as load:
            for _ in range(3):
                load.wait_for_all()
                server.reload()
            wait_until(lambda: server.log.count('Booting worker') > 12)
            load.wait_for_all()
        assert not load.failed
        assert is_alive(server.pid)
        assert len(server.plants()) == len(load.added)
        assert not re.search('Traceback|ERROR| 503 |was sent', server.log)


@pytest.mark.skipif(sys.platform != 'linux', reason='it reads /proc')
def test_reloads_free_what_they_replace(tmp_path):
    """A reload of a large file leaves no index behind; it has 24 bytes for a plant."""
    lines = [b'{"id":%d,"name":"Fern"}\n' % id for id in range(200_000)]
    (tmp_path / 'plants.jsonl').write_bytes(b''.join(lines))
    with Server(tmp_path) as server:
        used = []
        for _ in range(5):
            server.reload()
            used.append(kib('Anonymous', server.pid))
        index = 24 * len(lines) / 1024
        assert used[-1] - used[1] < 2 * index, used  # of three reloads


@pytest.mark.parametrize('is_ignored', [False, True])
def test_closed_terminal_ends_the_service(tmp_path, is_ignored):
    """It does, as for each program; SIGHUP reloads before, and after ``nohup``."""
    command = [*GUNICORN, '-w1', '-b127.0.0.1:0', '-ppid', '--error-logfile=log']
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover
        os.chdir(tmp_path)
        os.environ['PLANTS_TOKENS'] = 'a' * 32
        how = signal.SIG_IGN if is_ignored else signal.SIG_DFL
        signal.signal(signal.SIGHUP, how)  # pytest may run under nohup
        os.execvp(command[0], command)
    log = tmp_path / 'log'

    def started(workers):
        return log.exists() and log.read_text().count('Booting worker') == workers

    try:
        wait_until(lambda: started(1), 'it serves')
        if is_ignored:
            os.close(terminal)
        os.kill(pid, signal.SIGHUP)
        wait_until(lambda: started(2), 'it reloads')
        if not is_ignored:
            os.close(terminal)
            wait_until(lambda: not is_alive(pid), 'it ends', 20)
            assert not (tmp_path / 'pid').exists()
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


@pytest.mark.parametrize('directory', ['.', 'removed'])
def test_reload_in_an_upgrade(tmp_path, directory):
    """The new server reloads while the old one has the pid file, and then takes it."""
    path = tmp_path / directory / 'pid.2'
    path.parent.mkdir(exist_ok=True)
    with Server(tmp_path, '-p', f'{directory}/pid') as server:
        with Load(server) as load:
            server.signal(signal.SIGUSR2)
            wait_until(lambda: server.log.count('Booting worker') == 2)
            os.kill(int(path.read_text()), signal.SIGHUP)
            wait_until(lambda: server.log.count('Booting worker') == 3)
            if directory == 'removed':
                path.parent.rename(tmp_path / 'moved')
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            wait_until(lambda: 'been promoted' in server.log and not path.exists())
            load.wait_for_all()
        assert not load.failed
        assert len(server.plants()) == len(load.added)
