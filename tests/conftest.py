"""Fixtures of all tests: application, command line, plant file, PostgreSQL."""

import gc
import json
import os
import shutil
import signal
import sys
import tempfile

import pytest

from store.__main__ import main
from store.memory import MemoryStore
from web import body

pytest.register_assert_rewrite('contract', 'disk')

pytest_plugins = ['exchange']  # fixtures of clients and servers

# A shell ignores it in what a script starts in the background, and processes inherit
# that: no test of an interrupt would pass.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In every environment a program's output waits in a buffer, and no client asks a proxy
# about a server on this machine.
os.environ.pop('PYTHONUNBUFFERED', None)
os.environ['no_proxy'] = f'localhost,127.0.0.1,{os.environ.get("no_proxy", "")}'

# Keep the files in memory where there is room: the tests wait for thousands of syncs,
# and only a power cut would show whether a sync did anything.
SHM = '/dev/shm'
has_room = os.path.isdir(SHM) and shutil.disk_usage(SHM).free > 2 * 2**30
if 'TMPDIR' not in os.environ and has_room:
    os.environ['TMPDIR'] = tempfile.tempdir = SHM


def pytest_collection_finish():
    """Exclude the collected tests from garbage collection: an eighth of the CPU."""
    gc.freeze()


@pytest.fixture
def store():
    """Return an empty store in memory."""
    return MemoryStore()


@pytest.fixture
def edit_schema(tmp_path, monkeypatch):
    """Return a function that changes the schema of a name, in a copy of the files."""
    directory = shutil.copytree(body.DIRECTORY, tmp_path / 'schemas')
    (directory / '.#Plant.json').symlink_to('nowhere')  # as while Emacs edits it
    shutil.copy(directory / 'Plant.json', directory / 'Plant.old.json')  # a backup
    monkeypatch.setattr(body, 'DIRECTORY', directory)

    def edit_schema(name, change):
        path = directory / f'{name}.json'
        schema = json.loads(path.read_bytes())
        change(schema)
        path.write_text(json.dumps(schema))

    return edit_schema


@pytest.fixture
def run(capfdbinary):
    """Return a function that runs a command; it returns code, output and errors."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ex:
            code = ex.code
        sys.stdout.flush()
        output, errors = capfdbinary.readouterr()
        return code, output, errors.decode().splitlines()

    return run


@pytest.fixture(scope='session')
def database():
    """A PostgreSQL server for all tests. Each test leaves it running."""
    # Imported here: most test modules need no database.
    from postgresql import PostgreSQL

    with PostgreSQL() as database:
        yield database


@pytest.fixture
def url(database):
    """The URL of an empty store in PostgreSQL."""
    return database.new_url()


@pytest.fixture
def path(tmp_path):
    """The path of a plant file that does not exist yet."""
    return tmp_path / 'plants.jsonl'


@pytest.fixture
def disk(path):
    """Install a disk without faults, on which there is no plant file yet."""
    # Imported here: it is a module beside the tests of stores.
    from disk import Disk, installed

    with installed(Disk(path)) as disk:
        yield disk
