"""Reloads: new files are used, bad files refused, and the master never blocks."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from exchange import assert_error, edit, fern
from server import (
    GUNICORN,
    REPOSITORY,
    TOKEN,
    RawClient,
    Server,
    configured,
    is_alive,
    request,
    wait_until,
)

IN_PLACE = GUNICORN[:3]  # with the configuration and the code of its directory
HALF = '{"type": "obj'


def reload(server):
    """Reload, and wait until every worker is a new one."""
    old = server.worker_pids()
    server.signal(signal.SIGHUP)
    wait_until(
        lambda: server.worker_pids() and not old & server.worker_pids(), 'all are new'
    )


def replace_worker(server):
    """Kill a worker, and wait until there is another one."""
    (victim, *others) = server.worker_pids()
    os.kill(victim, signal.SIGKILL)

    def is_another():
        pids = server.worker_pids() - {victim}
        return len(pids) > len(others)

    wait_until(is_another, 'there is another worker', 5)
    wait_until(lambda: not Path(f'/proc/{victim}').exists(), 'it is reaped', 5)


def child_pids(pid):
    """Return the process ids of the children of a process."""
    found = set()
    for task in Path(f'/proc/{pid}/task').iterdir():  # threads have children, too
        with suppress(FileNotFoundError):  # it has just ended
            found |= set(map(int, (task / 'children').read_text().split()))
    return found


def add_plants(server, **members):
    """Add plants, each on a connection of its own; return the set of statuses."""
    with ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in range(10)]
        return {client.ask(request(body=fern(**members))).status for client in clients}


def test_reload_uses_all_new_files(copy):
    """New workers run the code, the schemas and the configuration as they are now."""
    with Server(copy, command=IN_PLACE) as server:
        edit(copy / 'app.py', "{'status': 'live'}", "{'status': 'still alive'}")
        edit(copy / 'schemas' / 'Plant.json', '"examples": ["Fern"]', '"maxLength": 4')
        edit(copy / 'gunicorn.conf.py', 'keepalive = 15', 'keepalive = 0')
        reload(server)
        answer = server.ask(request('GET', '/livez'))
        assert answer.json == {'status': 'still alive'}
        assert answer.announces_close
        assert_error(server.ask(request(body=fern() | {'name': 'Ferns'})), 40005)


def test_new_files_are_checked_by_new_code(copy):
    """Only the new code decides whether new files are valid."""
    with Server(copy, command=IN_PLACE) as server:
        edit(copy / 'schemas' / '__init__.py', "glob('*.json')", "glob('[NPE]*.json')")
        (copy / 'schemas' / 'other.json').write_text('true')
        reload(server)
        assert server.ask(request(body=fern())).status == 200


BROKEN = {
    'code': ('app.py', 'class LiveResource:', 'class LiveResource(:', 'SyntaxError'),
    'schema': ('schemas/Plant.json', '"type": "object"', '"type": 1', 'Plant.json'),
    'configuration': ('gunicorn.conf.py', 'keepalive = 15', 'keepalive =', 'keepalive'),
}


def test_reload_that_would_fail_changes_nothing(copy, subtests):
    """Files that new workers could not start with are refused until they are fixed."""
    with Server(copy, command=IN_PLACE) as server:
        workers = server.worker_pids()
        for number, (name, (file, old, new, word)) in enumerate(BROKEN.items(), 1):
            with subtests.test(name):
                edit(copy / file, old, new)
                server.signal(signal.SIGHUP)
                wait_until(
                    lambda number=number: server.log.count('Not reloaded') == number,
                    'it is refused',
                )
                assert word in server.log.rpartition('Handling signal: hup')[2]
                assert server.ask(request(body=fern())).status == 200
                assert server.worker_pids() == workers
                edit(copy / file, new, old)
        reload(server)
        assert server.ask(request(body=fern())).status == 200


def test_generated_token_survives_a_reload(tmp_path):
    """The generated token is printed once and is still accepted after SIGHUP."""
    with Server(tmp_path, PLANTS_TOKENS=None) as server:
        [header] = re.findall("'(Authorization: .+?)'", server.log)
        token = header.rpartition(' ')[2]
        reload(server)
        data = request(body=fern(), authorization=f'Bearer {token}')
        assert server.ask(data).status == 200
        assert server.log.count('No token is configured') == 1


def test_broken_tokens_file_keeps_the_old_tokens(tmp_path):
    """A broken tokens file refuses a reload; a new worker accepts the old tokens."""
    tokens = tmp_path / 'tokens'
    tokens.write_text(f'garden {TOKEN}\n')
    settings = {'PLANTS_TOKENS': None, 'PLANTS_TOKENS_FILE': str(tokens)}
    with Server(tmp_path, **settings) as server:
        [before] = server.worker_pids()
        tokens.write_text('more than two words\n')
        server.signal(signal.SIGHUP)
        refusal = 'line 1: it is not TOKEN or NAME TOKEN'
        wait_until(lambda: 'Not reloaded' in server.log, 'it is refused')
        assert refusal in server.log
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not is_alive(before), 'the old worker ends')
        wait_until(lambda: server.worker_pids(), 'a new worker starts')
        assert server.ask(request(body=fern())).status == 200


def test_half_edited_files_are_not_read_before_a_reload(copy):
    """A replaced worker serves what the master has read, and no process ends."""
    with Server(copy, command=IN_PLACE, workers=2) as server:
        for path in (
            'schemas/NewPlant.json',
            'app.py',
            'gunicorn.conf.py',
            'web/request.py',
        ):
            (copy / path).write_text(HALF)
        for _ in range(3):
            replace_worker(server)
        assert add_plants(server) == {200}
        answer = server.ask(request(body={'id': 'x'}))
        assert_error(answer, 40005)
        assert 'ERROR] Exception' not in server.log


def test_edited_schema_is_used_by_no_worker_or_by_all(copy):
    """A valid edit of a schema is used after a reload, by all workers alike."""
    with Server(copy, command=IN_PLACE, workers=2) as server:
        edit(copy / 'schemas' / 'Plant.json', '"examples": ["Fern"]', '"maxLength": 4')
        replace_worker(server)
        assert add_plants(server, name='Ferns') == {200}
        reload(server)
        assert add_plants(server, name='Ferns') == {400}
        assert add_plants(server, name='Moss') == {200}


@contextmanager
def locked(directory):
    """Hold the lock of the plant file, as any process may that can read the file."""
    with (directory / 'plants.jsonl').open('rb') as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def test_master_does_not_wait_for_the_lock(tmp_path):
    """While another process has the lock, workers are replaced and the server ends."""
    with Server(tmp_path, workers=2) as server:
        with locked(tmp_path):
            workers = server.worker_pids()
            server.signal(signal.SIGHUP)
            wait_until(lambda: child_pids(server.pid) > workers, 'it is rehearsed')
            replace_worker(server)
            wait_until(lambda: 'Not reloaded' in server.log, 'it is refused')
            assert 'plants.jsonl' in server.log
            assert server.ask(request('GET', '/livez')).status == 200
            server.signal(signal.SIGHUP)
            workers = server.worker_pids()
            wait_until(lambda: child_pids(server.pid) > workers, 'it is rehearsed')
            rehearsal = child_pids(server.pid) - workers
            server.signal(signal.SIGTERM)
            assert server.wait(5) == 0
        wait_until(lambda: not any(map(is_alive, rehearsal)), 'nothing is left')


HANGING = [
    'import sys, time',
    'lifecycle.REHEARSAL_TIMEOUT = 4',
    "if sys.argv[0] == '-c' and Path('hang').exists(): time.sleep(1000)",
]


def test_hanging_rehearsal_is_ended(tmp_path):
    """A rehearsal that hangs refuses the reload, and blocks nothing else."""
    hang = tmp_path / 'hang'
    with Server(tmp_path, *configured(tmp_path, *HANGING)) as server:
        for ends in ('in time', 'with the server'):
            workers = server.worker_pids()
            hang.touch()
            server.signal(signal.SIGHUP)
            wait_until(lambda old=workers: child_pids(server.pid) > old, 'it hangs')
            rehearsal = child_pids(server.pid) - workers
            if ends == 'in time':
                replace_worker(server)
                wait_until(lambda: 'within 4 s' in server.log, 'it is given up')
                hang.unlink()
                reload(server)
                assert add_plants(server) == {200}
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 0
        wait_until(lambda: not any(map(is_alive, rehearsal)), 'nothing is left')


def test_reload_that_fails_after_the_rehearsal_serves_as_before(tmp_path):
    """A file that changes between the rehearsal and the reload ends no process."""
    lines = [
        'import sys',
        "if sys.argv[0] != '-c' and Path('broken').exists(): statsd_host = 'x:1'",
    ]
    with Server(tmp_path, *configured(tmp_path, *lines)) as server:
        (tmp_path / 'broken').touch()
        reload(server)
        refusal = 'Reloaded gunicorn.conf.py, not the application: statsd_host'
        assert refusal in server.log
        assert add_plants(server) == {200}
        (tmp_path / 'broken').unlink()
        reload(server)
        assert add_plants(server) == {200}


def test_many_signals_at_once_are_few_reloads(tmp_path):
    """For 500 SIGHUPs files are rehearsed once or twice, and not in parallel."""
    with Server(tmp_path) as server:
        (old,) = server.worker_pids()
        for _ in range(500):
            server.signal(signal.SIGHUP)
        most = 0

        def is_over():
            nonlocal most
            most = max(most, len(list(Path(f'/proc/{server.pid}/task').iterdir())))
            return old not in server.worker_pids()

        wait_until(is_over, 'it is reloaded')
        wait_until(lambda: len(child_pids(server.pid)) == 1, 'it is over')
        assert most < 8
        assert server.log.count('Handling signal: hup') <= 3
        assert add_plants(server) == {200}


GENERATIONS = """
import gc, weakref
import serving

def load():
    serving.forget_modules()
    import app, schemas
    from serving import lifecycle
    from store import open_store
    from store.jsonl import file
    from web import documents, errors, tokens
    app.create_app(open_store('jsonl:none', create='never'), tokens='a' * 20)
    modules = app, documents, errors, file, lifecycle, schemas, tokens
    kinds = type, type(load)
    return [
        weakref.ref(value)
        for module in modules
        for value in vars(module).values()
        if isinstance(value, kinds) and value.__module__ == module.__name__
    ]

first, second = load(), load()
gc.collect()
assert len(first) == len(second) > 50
print([ref() for ref in first if ref() is not None])
"""


def test_reload_frees_the_old_code(tmp_path):
    """The old code is freed, so that a master does not grow with reloads."""
    environment = {
        name: text for name, text in os.environ.items() if 'COVERAGE' not in name
    }
    done = subprocess.run(
        [sys.executable, '-c', GENERATIONS],
        cwd=tmp_path,
        env=environment | {'PYTHONPATH': str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ('[]\n', '')


def test_reload_to_an_address_in_use_is_refused(copy):
    """A new address is tried before the old one is given up."""
    settings = copy / 'gunicorn.conf.py'
    text = settings.read_text()
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(('127.0.0.1', 0)))]
        for _ in range(2):
            sockets.append(opened.enter_context(socket.create_server(('127.0.0.1', 0))))
        taken, first, second = (one.getsockname()[1] for one in sockets)
        sockets[1].close()
        settings.write_text(f"{text}\nbind = '127.0.0.1:{first}'\n")
        with Server(copy, command=IN_PLACE, GUNICORN_CMD_ARGS=None) as server:
            # A list: Python takes an edit of the same second and size for no edit.
            settings.write_text(f"{text}\nbind = ['127.0.0.1:{taken}']\n")
            server.signal(signal.SIGHUP)
            wait_until(lambda: 'Not reloaded' in server.log, 'it is refused')
            assert f'127.0.0.1:{taken}: Address already in use' in server.log
            assert add_plants(server) == {200}
            sockets[2].close()
            settings.write_text(f"{text}\nbind = '127.0.0.1:{second}'\n")
            reload(server)
            with RawClient(second) as client:
                assert client.ask(request('GET', '/livez')).status == 200


def test_reload_may_change_the_worker_class(copy):
    """A reload may change to gunicorn's gthread worker, and back to ours."""
    settings = copy / 'gunicorn.conf.py'
    ours = settings.read_text()
    threads = ours.replace('worker_class = PlantsWorker', "worker_class = 'gthread'")
    with Server(copy, command=IN_PLACE, workers=2) as server:
        for text in (threads, ours):
            settings.write_text(text)
            reload(server)
            assert add_plants(server) == {200}


def test_new_worker_adds_nothing_to_another_file(tmp_path):
    """A worker that starts after the plant file was replaced refuses the new file."""
    plants, away = tmp_path / 'plants.jsonl', tmp_path / 'away'
    with Server(tmp_path) as server:
        assert add_plants(server) == {200}
        plants.rename(away)
        plants.touch()
        replace_worker(server)
        assert add_plants(server) == {503}
        assert plants.read_bytes() == b''
        away.replace(plants)
        assert add_plants(server) == {200}
