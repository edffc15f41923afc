"""Real servers, each in a process group and with its files in a directory."""

import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rawclient import TOKEN, RawClient, request
from waiting import PATIENCE, wait_until
from warm import WarmProcess, cold_process

REPOSITORY = Path(__file__).resolve().parent.parent
# The files of a checkout that a server needs.
ROOMS = ('app.py', 'gunicorn.conf.py', 'schemas', 'serving', 'store', 'web')
SCRIPTS = Path(sys.executable).parent
GUNICORN = (
    *(sys.executable, '-m', 'gunicorn', '--pythonpath', str(REPOSITORY)),
    *('-c', str(REPOSITORY / 'gunicorn.conf.py')),
)
PIPES = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}


def installed(program, packages):
    """Return the path of a program, or skip the test if it is not installed."""
    # Debian installs servers in /usr/sbin, which only root has in PATH.
    path = shutil.which(program, path=f'{os.environ["PATH"]}:/usr/sbin')
    if path is None:
        pytest.skip(f'it needs {program}: apt-get install {packages}')
    return path


def in_namespace(*kinds):
    """Return the beginning of a command in new namespaces, or skip the test."""
    command = [installed('unshare', 'util-linux'), *kinds]
    if finished([*command, 'true']).returncode:
        pytest.skip('this machine or this user can make no namespaces')
    return command


def make_certificate(directory):
    """Make one for localhost, and its key; return a context of TLS that trusts it."""
    openssl = [installed('openssl', 'openssl'), 'req', '-x509', '-nodes', '-days', '2']
    openssl += ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1']
    openssl += ['-subj', '/CN=localhost', '-addext', 'subjectAltName=DNS:localhost']
    openssl += ['-keyout', 'plants.key', '-out', 'plants.pem']
    finished(openssl, cwd=directory, check=True)
    return ssl.create_default_context(cafile=directory / 'plants.pem')


def time_limits(**seconds):
    """Return lines of configuration: limits for clients that are no settings."""
    lines = [f'connection.{name} = {value}' for name, value in seconds.items()]
    begin = 'from serving import connection, worker'
    return [begin, *lines, 'worker.LINGER = connection.LINGER']


def finished(command, **options):
    """Run a command that ends by itself; return its exit code, output and errors."""
    options = {**PIPES, 'text': True, 'timeout': PATIENCE, **options}
    return subprocess.run(command, **options)


@contextmanager
def command(*arguments, **options):
    """Run a command of the store in a child process; kill it at the end."""
    options = {'cwd': REPOSITORY, **PIPES, **options}
    words = [sys.executable, '-m', 'store', *map(str, arguments)]
    with subprocess.Popen(words, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port():
    """Return a free port below those that Linux gives to clients and servers."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as free, suppress(OSError):
            free.bind(('127.0.0.1', port))
            return port


def is_alive(pid):
    """Whether a process runs. A zombie does not."""
    if sys.platform != 'linux':
        state = finished(['ps', '-o', 'stat=', '-p', str(pid)]).stdout
        return bool(state) and not state.startswith('Z')
    try:
        return ') Z ' not in Path(f'/proc/{pid}/stat').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class Server:
    def __init__(
        self,
        directory,
        *arguments,
        command=GUNICORN,
        workers=1,
        conf=(),  # lines at the end of gunicorn.conf.py
        is_tls=False,
        **environment,
    ):
        self.directory, self.trust = directory, None
        if conf:
            ours, more = REPOSITORY / 'gunicorn.conf.py', directory / 'more.conf.py'
            lines = [f'__file__ = {str(ours)!r}', ours.read_text(), *conf]
            more.write_text('\n'.join(lines))
            arguments = '-c', more, *arguments
        if is_tls:
            self.trust = make_certificate(directory)
            files = ('--certfile', 'plants.pem', '--keyfile', 'plants.key')
            arguments = *files, *arguments
        self._command = [str(word) for word in (*command, *arguments)]
        # To measure coverage, Python must be started for it, and end by itself.
        self._is_covered = 'COVERAGE_PROCESS_CONFIG' in os.environ
        self._is_warm = tuple(command[:3]) == GUNICORN[:3] and not self._is_covered
        self._workers = workers
        self._log_path = directory / 'server.log'
        # No arguments, so that a test can run exactly what people type.
        settings = {'PLANTS_TOKENS': TOKEN, 'GUNICORN_CMD_ARGS': '--bind 127.0.0.1:0'}
        settings |= {'WEB_CONCURRENCY': workers and str(workers), **environment}
        ours = ('PLANTS_', 'GUNICORN_', 'WEB_CONCURRENCY', 'PROMETHEUS_')
        others = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        both = (others | settings).items()
        self._environment = {k: v for k, v in both if v is not None}

    def __enter__(self):
        self.start()
        try:
            wait_until(self._serves, 'the server serves')
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info):
        self.stop()

    def start(self):
        """Start the server without waiting for it."""
        self._port = None
        start = WarmProcess if self._is_warm else cold_process
        self._log_path.write_bytes(b'')
        where = self.directory, self._environment, self._log_path
        self._process = start(self._command, *where)

    def stop(self):
        """Kill the server."""
        with suppress(ProcessLookupError):
            if self._is_covered:
                os.killpg(self.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.wait()
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    @contextmanager
    def started(self):
        """Start the server without waiting for it; stop it at the end."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def run(self):
        """Start a server that ends by itself; return its exit code."""
        with self.started():
            return self.wait()

    def wait(self, seconds=PATIENCE):
        """Wait until the server has ended; return its exit code."""
        return self._process.wait(seconds)

    def signal(self, number):
        """Send a signal to the process that was started."""
        self._process.send_signal(number)

    def reload(self):
        """Reload, and wait until every worker is a new one."""
        old = self.worker_pids()
        self.signal(signal.SIGHUP)
        wait_until(lambda: (new := self.worker_pids()) and old.isdisjoint(new))

    @property
    def pid(self):
        return self._process.pid

    @property
    def log(self):
        """The server's stdout and stderr."""
        return self._log_path.read_bytes().decode('utf-8', 'replace')

    @property
    def port(self):
        address = r'(?:Listening at:|Serving on|to try it:) https?://\S+?:(\d+)'
        if not self._port and (found := re.search(address, self.log)):
            self._port = int(found[1])
        return self._port

    def worker_pids(self):
        """Return the process ids of the workers that are alive."""
        # Not by a regular expression: tests ask often, and the log may have megabytes.
        _, *ends = self._log_path.read_bytes().split(b'Booting worker with pid: ')
        pids = {int(re.match(rb'\d+', end)[0]) for end in ends}
        return {pid for pid in pids if is_alive(pid)}

    def connect(self):
        return RawClient(self.port, trust=self.trust)

    def ask(self, data):
        """Send a request on a connection of its own and return its answer."""
        with self.connect() as client:
            return client.ask(data)

    def plants(self):
        """Return the plants of the plant file, read without the store."""
        lines = (self.directory / 'plants.jsonl').read_bytes().splitlines()
        return [json.loads(line) for line in lines]

    def _serves(self):
        """Whether every worker has started, and one answers."""
        code = self._process.poll()
        assert code is None, f'it ended with exit code {code}:\n{self.log}'
        if not self.port or (self._workers or 0) > len(self.worker_pids()):
            return False
        with suppress(ConnectionError):
            return self.ask(request('GET', '/livez'))
