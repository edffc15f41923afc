"""Real servers on real sockets, and a client that sends whatever bytes it is given."""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
# What a checkout needs to serve.
ROOMS = ('app.py', 'gunicorn.conf.py', 'schemas', 'serving', 'store', 'web')
SCRIPTS = Path(sys.executable).parent
GUNICORN = (
    *(sys.executable, '-m', 'gunicorn', '--pythonpath', str(REPOSITORY)),
    *('-c', str(REPOSITORY / 'gunicorn.conf.py')),
)
TOKEN = 'a-token-that-no-log-may-show'
PATIENCE = 20  # seconds; much longer than anything takes that works


def wait_until(condition, what, seconds=PATIENCE):
    """Return what a condition returns, as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (outcome := condition()):
        assert time.monotonic() < deadline, f'{what}: not within {seconds} s'
        time.sleep(0.01)
    return outcome


def installed(program, packages):
    """Return where a program is; where it is not installed, skip the test.

    What the tests need besides pip's packages is not worth refusing all the others to
    somebody who has only those. ``.ci/run`` installs it.
    """
    # Debian keeps servers where only root's commands are looked for.
    path = shutil.which(program, path=f'{os.environ["PATH"]}:/usr/sbin')
    if path is None:
        pytest.skip(f'it needs {program}: apt-get install {packages}')
    return path


def configured(directory, *lines):
    """Return the arguments for gunicorn that add lines to our configuration."""
    path = directory / 'more.conf.py'
    ours = REPOSITORY / 'gunicorn.conf.py'
    begin = [
        'from pathlib import Path',
        f'__file__ = {str(ours)!r}',
        'exec(Path(__file__).read_bytes())',
    ]
    path.write_text('\n'.join([*begin, *lines]))
    return '-c', str(path)


def hurried(directory, **limits):
    """Return the arguments for a server that waits less long for its database.

    Args:
        directory: Of the server.
        limits: Of ``store.postgresql.limits``, in seconds.
    """
    lines = ['from store.postgresql import limits']
    lines += [f'limits.{name} = {seconds}' for name, seconds in limits.items()]
    return configured(directory, *lines)


def free_port():
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def socket_to(path):
    """Return a socket that is connected to the one at a path."""
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(PATIENCE)
    connected.connect(str(path))
    return connected


def is_alive(pid):
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        return ') Z ' not in Path(f'/proc/{pid}/stat').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def request(method='POST', target='/plants', body=b'', *, version='1.1', **headers):
    """Return the bytes of a request with the token and a body of JSON.

    A keyword is a header, ``content_type='text/plain'`` for example: a list is one that
    comes several times, and ``None`` takes one away that would be there by default.
    """
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    defaults = {'host': 'localhost', 'authorization': f'Bearer {TOKEN}'}
    if body:
        defaults['content_type'] = 'application/json'
        if 'transfer_encoding' not in headers:
            defaults['content_length'] = str(len(body))
    lines = [f'{method} {target} HTTP/{version}']
    for name, value in (defaults | headers).items():
        for text in value if isinstance(value, list) else [value]:
            if text is not None:
                lines.append(f'{name.replace("_", "-")}: {text}')
    return '\r\n'.join([*lines, '', '']).encode('latin-1') + body


@dataclass(frozen=True)
class Answer:
    """An answer, its header names in lower case."""

    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        assert self.headers['content-type'] == 'application/json', self
        return json.loads(self.body)

    @property
    def announces_close(self):
        return self.headers.get('connection') == 'close'


class RawClient:
    """One connection: send bytes, receive answers one after another.

    Args:
        port: Where to connect to.
        timeout: How long to wait for anything, in seconds.
        over: A socket that is connected already, instead.
    """

    def __init__(self, port=None, timeout=PATIENCE, *, over=None):
        self._socket = over or socket.create_connection(('127.0.0.1', port), timeout)
        self._stream = self._socket.makefile('rb')

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def send(self, data):
        # A server may close while a body that it refuses is still on its way: what it
        # answered before is there to be received all the same.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def receive(self, *, head=False):
        """Return the next answer, or ``None`` if the server closed the connection.

        Args:
            head: It answers a HEAD request, and so has no body.

        Raises:
            ConnectionError: It is cut off.
        """
        try:
            line = self._stream.readline()
            if not line:
                return None
            status = int(re.fullmatch(rb'HTTP/1\.[01] (\d{3}) [ -~]*\r\n', line)[1])
            headers = self._headers()
            length = 0 if head or status == 100 else int(headers['content-length'])
            body = self._stream.read(length)
        except ConnectionResetError:
            return None
        if len(body) < length:
            raise ConnectionError(f'it ends after {len(body)} of {length} bytes')
        return Answer(status, headers, body)

    def ask(self, data):
        """Send a request and return its answer."""
        self.send(data)
        return self.receive()

    def is_readable(self, seconds=0):
        """Whether there is an answer, or the end, to receive."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def finish_sending(self):
        """Let the server see the end of the stream, and go on receiving."""
        with suppress(OSError):  # the server may have closed already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self):
        self._stream.close()
        self._socket.close()

    def _headers(self):
        headers = {}
        while (line := self._stream.readline()) != b'\r\n':
            if not line:
                raise ConnectionError('the answer ends in its head')
            name, value = re.fullmatch(rb'([!-9;-~]+): (.*)\r\n', line).groups()
            name = name.decode().lower()
            assert name not in headers, f'{name} comes twice'
            headers[name] = value.decode('latin-1')
        return headers


class Server:
    """A server in a process group of its own, with its files in a directory.

    It listens at a port that the system chooses, and it is entered when it answers and
    all its workers do. When it is left, every process of the group has ended.

    Args:
        directory: Where it runs, and where its log and its plants are.
        arguments: For the command line.
        command: What to run; gunicorn as the repository configures it by default.
        workers: How many, or ``None`` if that is left to the configuration.
        environment: Variables to set, or with ``None`` to remove.
    """

    def __init__(
        self, directory, *arguments, command=GUNICORN, workers=1, **environment
    ):
        self.directory = directory
        self._command = [*command, *arguments]
        self._workers = workers
        self._log_path = directory / 'server.log'
        self._environment = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(('PLANTS_', 'GUNICORN_', 'WEB_CONCURRENCY'))
        }
        settings = {
            'PLANTS_TOKENS': TOKEN,
            # Not an argument, so that a command stays what people type.
            'GUNICORN_CMD_ARGS': '--bind 127.0.0.1:0',
            'WEB_CONCURRENCY': workers and str(workers),
        }
        for name, text in (settings | environment).items():
            self._environment.pop(name, None)
            if text is not None:
                self._environment[name] = text

    def __enter__(self):
        self.start()
        try:
            self._wait_for_workers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info):
        self.stop()

    def start(self):
        """Start it, and do not wait for it."""
        with self._log_path.open('wb') as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self):
        """End it, at once if it can and by force if it cannot."""
        try:
            self.interrupt()
            self.wait(3)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def run(self, seconds=PATIENCE):
        """Start it, where it is expected to end by itself; return its exit code."""
        self.start()
        try:
            return self.wait(seconds)
        finally:
            self.stop()

    def wait(self, seconds=PATIENCE):
        """Wait for its end and return its exit code."""
        return self._process.wait(seconds)

    def signal(self, number):
        """Send a signal to the process that was started."""
        self._process.send_signal(number)

    def interrupt(self):
        """Do what Ctrl-C does: SIGINT to every process of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    @property
    def pid(self):
        return self._process.pid

    @property
    def log(self):
        """Everything that it wrote, to both of its streams."""
        return self._log_path.read_text('utf-8', 'replace')

    @property
    def port(self):
        found = re.search(r'(?:Listening at:|Serving on) http://\S+?:(\d+)', self.log)
        return found and int(found[1])

    def worker_pids(self):
        """Return the workers that are alive."""
        pids = map(int, re.findall(r'Booting worker with pid: (\d+)', self.log))
        return {pid for pid in pids if is_alive(pid)}

    def memory(self):
        """Return what all workers have in memory, in MiB."""
        pages = 0
        for pid in self.worker_pids():
            pages += int(Path(f'/proc/{pid}/statm').read_text().split()[1])
        return pages * os.sysconf('SC_PAGE_SIZE') / 2**20

    def worker_of(self, answer):
        """Return the worker that logged the request of an answer."""
        id = re.escape(answer.headers['x-request-id'])
        line = rf'(?:\[|"pid": )(\d+)(?:\] \[INFO\] |.*"request_id": "){id}[ "]'
        return int(wait_until(lambda: re.search(line, self.log), 'it is logged')[1])

    def connect(self, timeout=PATIENCE):
        return RawClient(self.port, timeout)

    def ask(self, data, **how):
        """Send a request on a connection of its own and return its answer."""
        with self.connect() as client:
            client.send(data)
            return client.receive(**how)

    def lines(self):
        """Return the lines of the plant file, as bytes."""
        return (self.directory / 'plants.jsonl').read_bytes().splitlines()

    def plants(self):
        """Return the plants of the plant file, as they are read without the store."""
        return [json.loads(line) for line in self.lines()]

    def _wait_for_workers(self):
        wait_until(lambda: self._is_running() and self.port, 'the server listens')
        seen = set()
        with ExitStack() as connections:

            def all_answer():
                assert self._is_running()
                answer = None
                with suppress(ConnectionError):
                    # NOTE: kept open, so that the next one goes to another worker.
                    client = connections.enter_context(self.connect())
                    answer = client.ask(request('GET', '/livez'))
                if answer and self._workers:
                    seen.add(self.worker_of(answer))
                return answer and len(seen) == (self._workers or 0)

            wait_until(all_answer, 'every worker answers')

    def _is_running(self):
        code = self._process.poll()
        assert code is None, f'it ended with exit code {code}:\n{self.log}'
        return True
