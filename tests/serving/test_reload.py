"""Reloads: they happen whole or not at all, and the master never blocks."""

import fcntl
import gc
import importlib
import os
import re
import signal
import typing
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FunctionType, SimpleNamespace

from exchange import assert_error, fern
from machine import child_pids, edit, locked
from server import GUNICORN, Server, is_alive, request, wait_until
from waiting import in_child

from serving import master

IN_PLACE = GUNICORN[:3]  # with the configuration and the code of its directory


def replace_worker(server):
    """Kill a worker, and wait until there is another one."""
    victim, *others = server.worker_pids()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(server.worker_pids() - {victim}) > len(others), 'another', 5)
    wait_until(lambda: not Path(f'/proc/{victim}').exists(), 'it is reaped', 5)


def add_plants(server):
    """Add plants, each on a connection of its own; return the set of statuses."""
    with ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in range(10)]
        return {client.ask(request(body=fern())).status for client in clients}


def test_reload_uses_all_new_files(checkout):
    """New workers have the code, schemas, settings and worker class as they are now."""
    variable = "raw_env = ['PLANTS_MAX_BODY=10']"
    settings = checkout / 'gunicorn.conf.py'
    settings.write_text(f'{settings.read_text()}\n{variable}\n')
    with Server(checkout, command=IN_PLACE) as server:
        assert_error(server.ask(request(body=fern())), 40003)
        edit(settings, variable, '')
        edit(checkout / 'app.py', "'status': 'live'", "'status': 'still alive'")
        schema = checkout / 'schemas/Plant.json'
        edit(schema, '"examples": ["Fern"]', '"maxLength": 4')
        edit(settings, 'keepalive = 15', 'keepalive = 0')
        edit(settings, 'worker_class = PlantsWorker', "worker_class = 'gthread'")
        server.reload()
        answer = server.ask(request('GET', '/livez'))
        assert answer.json == {'status': 'still alive'}
        assert answer.announces_close
        assert_error(server.ask(request(body=fern() | {'name': 'Ferns'})), 40005)
        edit(settings, "worker_class = 'gthread'", 'worker_class = PlantsWorker')
        server.reload()
        assert add_plants(server) == {200}
        assert server.ask(request(body=fern())).announces_close  # keepalive is 0
        (checkout / 'plants.jsonl').unlink()
        assert server.ask(request(body=fern())).status == 503
        server.reload()
        assert server.ask(request(body=fern())).status == 200


# Lines at the end of gunicorn.conf.py, and what the log then names.
REFUSED = {
    'syntax': ('keepalive =', 'gunicorn.conf.py, line'),
    'setting': (
        "os.write(2, b'\\xff\\n')\nkeepalive = 'long'",
        'Invalid value for keepalive',
    ),
    'one more address': ("bind = 2 * ['127.0.0.1:0']", 'bind: a change needs'),
    'pid file': ("pidfile = 'new.pid'", 'pidfile: a change needs'),
    'shared port': ('reuse_port = True', 'reuse_port: a change needs'),
    'capture of the output': (
        "capture_output, errorlog = True, 'new.log'\n"
        'post_fork = lambda server, worker: 1 / 0',
        'capture_output: a change needs',
    ),
    'two faults': (
        "accesslog = 'no/log'\ncertfile = 'no.pem'",
        'it is not a directory that can be written to; certfile, keyfile: ',
    ),
    'hook of the master': (
        "chdir = 'store'\non_reload = lambda server: 1 / 0",
        'ZeroDivisionError',
    ),
    'hook of a worker': (
        "errorlog = 'new.log'\npost_fork = lambda server, worker: 1 / 0",
        'a new worker does not serve',
    ),
    'hook of the master for each worker that ends': (
        'workers = 2\n'
        'post_fork = lambda server, worker: len(server.WORKERS) < 2 or 1 / 0\n'
        'child_exit = lambda server, worker: 1 / 0',
        'a new worker does not serve',
    ),
    'worker that hangs': (
        'import time\nmaster.BOOT_SECONDS = 1\n'
        'post_fork = lambda server, worker: time.sleep(3600)',
        'a new worker does not serve',
    ),
    'hook of a worker that has begun': (
        'workers = 1\n'
        "raw_env = ['PLANTS_STORE=memory:']\n"
        'post_worker_init = lambda worker: worker.sockets.append(None)',
        'a new worker does not serve',
    ),
}


def outcomes(server):
    """Return how many reloads have ended, one way or the other."""
    return server.log.count('Not reloaded') + server.log.count('Reloaded: ')


def try_to_reload(server):
    """Reload, and return what the log then says."""
    before, log = outcomes(server), len(server.log)
    server.signal(signal.SIGHUP)
    wait_until(lambda: outcomes(server) > before, 'it is over')
    return server.log[log:]


def test_reload_that_would_fail_changes_nothing(checkout, subtests):
    """What new workers could not start with is refused, until it is corrected."""
    settings = checkout / 'gunicorn.conf.py'
    more = "master.BOOT_SECONDS = 60\nbind = '127.0.0.1:0'"
    ours = f'{settings.read_text()}\n{more}\n'
    settings.write_text(ours)
    with Server(checkout, command=IN_PLACE, GUNICORN_CMD_ARGS=None) as server:
        workers = server.worker_pids()
        for name, (line, words) in REFUSED.items():
            settings.write_text(f'{ours}{line}\n')
            with subtests.test(name):
                log = try_to_reload(server)
                [refusal] = re.findall('.*Not reloaded.*', log)
                assert words in refusal
                assert server.ask(request(body=fern())).status == 200
                assert server.worker_pids() == workers
                assert os.readlink(f'/proc/{server.pid}/cwd') == str(checkout)
        server.signal(signal.SIGTTIN)  # a store in memory would permit no second one
        wait_until(lambda: server.worker_pids() > workers, 'there is another worker')
        settings.write_text(ours)
        server.reload()
        assert server.ask(request(body=fern())).status == 200


BREAKING = """
import atexit, contextlib, sys
from pathlib import Path

def at(step):
    order = Path('order')
    with contextlib.suppress(FileNotFoundError):  # two workers may do this
        when, *names = order.read_text().split()
        if when == step:
            for name in names:
                Path(name).write_text('{"type": "obj')
            order.unlink()

if '--check-config' in sys.argv:
    atexit.register(at, 'checked')
else:
    at('read')
"""
HOOKS = """
def on_reload(server):
    at('build')
    lifecycle.on_reload(server)

def nworkers_changed(server, new, old):
    at('setup')

def post_fork(server, worker):
    at('fork')

def child_exit(server, worker):
    at('stop')
    lifecycle.child_exit(server, worker)
"""


FILES = ('app.py', 'gunicorn.conf.py', 'schemas/Plant.json')
# The configuration is read first, and each other file until the application is built.
MOMENTS = [
    ('checked', 'gunicorn.conf.py'),
    *[(step, name) for step in ('read', 'build') for name in FILES],
    *[(step, *FILES) for step in ('setup', 'fork', 'stop')],
]


def test_files_may_break_at_any_moment_of_a_reload(checkout, subtests):
    """Whenever a file breaks, the server goes on: as before, or reloaded."""
    configuration = checkout / 'gunicorn.conf.py'
    configuration.write_text(BREAKING + configuration.read_text() + HOOKS)
    sound = {name: (checkout / name).read_text() for name in FILES}
    with Server(checkout, command=IN_PLACE, workers=2) as server:
        for order in map(' '.join, MOMENTS):
            with subtests.test(order):
                old = server.worker_pids()
                (checkout / 'order').write_text(order)
                log = try_to_reload(server)
                assert is_alive(server.pid)
                wait_until(lambda: not (checkout / 'order').exists(), 'it breaks')
                wait_until(lambda: len(server.worker_pids()) == 2, 'it is over')
                if 'Not reloaded' in log:
                    assert server.worker_pids() == old
                assert add_plants(server) == {200}
                replace_worker(server)  # it serves what the others serve
                assert add_plants(server) == {200}
                assert 'Traceback' not in log
            for name, text in sound.items():
                (checkout / name).write_text(text)
        server.reload()
        assert add_plants(server) == {200}


def test_master_does_not_wait_for_the_lock(tmp_path):
    """While another process has the lock, the server reloads, and ends."""
    plants = tmp_path / 'plants.jsonl'
    with Server(tmp_path, workers=2) as server, locked(plants, fcntl.LOCK_SH):
        replace_worker(server)
        server.reload()
        assert server.ask(request('GET', '/livez')).status == 200
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 0


# Only a check that hangs has its time cut: a sound one may take long on a busy machine.
HANGING = [
    'import signal, sys, time',
    "if '--check-config' in sys.argv and Path('hang').exists():",
    '    signal.alarm(2 if signal.alarm(0) else 0)',
    '    time.sleep(1000)',
]


def test_hanging_check_is_ended(tmp_path):
    """A check that hangs refuses the reload, and blocks nothing else."""
    hang = tmp_path / 'hang'
    with Server(tmp_path, conf=HANGING) as server:
        hang.touch()
        server.signal(signal.SIGHUP)
        wait_until(lambda: child_pids(server.pid) > server.worker_pids(), 'it hangs')
        replace_worker(server)
        wait_until(lambda: 'longer than 300 s' in server.log, 'it is given up')
        hang.unlink()
        server.reload()
        assert add_plants(server) == {200}


def test_reloads_leave_nothing(tmp_path):
    """After two reloads the master has the files open that it had after one."""

    def open_files():
        """Return the files of the master, once it has those of one worker."""
        with suppress(FileNotFoundError):  # one was closed in between
            links = list(Path(f'/proc/{server.pid}/fd').iterdir())
            names = [re.sub('(?<=wgunicorn-).*', '', os.readlink(x)) for x in links]
            if sum(name.endswith('wgunicorn-') for name in names) == 1:
                return sorted(re.sub('[0-9].*', '', name) for name in names)
        return None

    with Server(tmp_path, PLANTS_METRICS='1') as server:
        counts = []
        for _ in range(2):
            server.reload()
            assert server.ask(request('GET', '/metrics')).status == 200
            counts.append(wait_until(open_files, 'the old worker is reaped'))
        assert counts[0] == counts[1]


def load():
    """Load the service anew; return weak references to its classes and functions."""
    master._forget_modules()
    names = 'app', 'schemas', 'serving.lifecycle', 'store.jsonl.file'
    names += 'web.documents', 'web.errors', 'web.tokens'
    modules = [importlib.import_module(name) for name in names]
    opened = importlib.import_module('store').open_store('jsonl:none', create='never')
    modules[0].create_app(opened, tokens='a' * 20)
    return [
        weakref.ref(value)
        for module in modules
        for value in vars(module).values()
        if isinstance(value, (type, FunctionType))
        and value.__module__ == module.__name__
    ]


def test_reload_frees_the_old_code():
    """The old code can be freed, so that a master does not grow with each reload."""

    def reload_twice():
        first, second = load(), load()
        for clear in getattr(typing, '_cleanups', ()):  # caches of a fixed size
            clear()
        gc.collect()
        assert len(first) == len(second) > 40
        assert not [ref() for ref in first if ref() is not None]

    in_child(reload_twice)


def test_reload_goes_on_with_the_counts_of_connections():
    """An old worker that dies in a reload is counted no more, also if that fails."""

    def reload_and_end():
        before = importlib.import_module('serving.worker').connection_counts
        master._forget_modules()
        assert importlib.import_module('serving.worker').connection_counts is before
        before[7] = 3
        old = SimpleNamespace(age=7)
        importlib.import_module('serving.lifecycle').child_exit(None, old)
        assert before[7] == 0

    in_child(reload_and_end)
