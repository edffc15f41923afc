"""The command line: copy between every pair of stores, with a real database."""

import errno
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from urllib.parse import quote

import pytest
from disk import append, fill, lines
from server import PATIENCE, REPOSITORY, command, finished, wait_until

from store import Plant, StoreUnavailable, open_store
from store.base import batches

KINDS = ['jsonl', 'postgresql']

FERN, MOSS, IVY = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Efeu ☘', '')
REED = Plant(1, 'Reed')


@pytest.fixture
def make(tmp_path, database):
    """Return a function that makes a store of a kind, and returns its URL."""
    numbers = iter(range(100))

    def make(kind, *plants):
        file = f'jsonl:{tmp_path}/{next(numbers)}.jsonl'
        url = file if kind == 'jsonl' else database.new_url()
        with open_store(url) as store:
            store.ping()
            store.add_many(plants)
        return url

    return make


def plants_in(url):
    """Return the plants of a store, in the order of their ids."""
    with open_store(url, create='never') as store:
        return sorted(store)


def many(count, first=0):
    """Return many plants, with ids from ``first`` on."""
    return [Plant(id, 'Fern', 'shade') for id in range(first, first + count)]


def counts(output):
    """Return the counts of a copy: copied, already there, conflicting."""
    last = output.decode().splitlines()[-1]
    pattern = r'copied: (\d+), already there: (\d+), conflicting: (\d+)'
    return tuple(map(int, re.fullmatch(pattern, last).groups()))


@pytest.mark.parametrize('target', KINDS)
@pytest.mark.parametrize('source', KINDS)
def test_copy_counts_plants(make, run, source, target):
    """The target gets the plants that it lacks, and keeps its own in conflicts."""
    source, target = make(source, REED, MOSS, IVY), make(target, FERN, MOSS)
    for copied in 1, 0:  # nothing the second time
        code, output, errors = run('copy', source, target)
        assert (code, errors) == (1, [])
        assert output.startswith(b'conflicting: {"id":1,"name":"Reed"}\ncopied')
        assert counts(output) == (copied, 2 - copied, 1)
        assert plants_in(target) == [FERN, MOSS, IVY]
    assert plants_in(source) == [REED, MOSS, IVY]


@pytest.fixture
def run_with_input(run, monkeypatch):
    """Return a function that runs a command with a standard input."""

    def run_with_input(text, *arguments):
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(text)))
        return run(*arguments)

    return run_with_input


class TestPipe:
    @pytest.mark.parametrize('kind', KINDS)
    def test_plants_come_through_a_pipe(self, make, run_with_input, kind):
        """Commands read JSON objects that are plants; no line feed need end them."""
        by_hand = b'{ "name": "Fern", "id": 1, "note": 1 }\r\n'
        text = by_hand + lines(FERN, MOSS, IVY).removesuffix(b'\n')
        url = make(kind, MOSS)
        code, output, errors = run_with_input(text, 'copy', '-', url)
        assert (code, counts(output), errors) == (0, (2, 2, 0), [])
        assert plants_in(url) == [FERN, MOSS, IVY]
        listed = lines(FERN, FERN, MOSS, IVY)
        assert run_with_input(text, 'list', '-') == (0, listed, [])
        assert run_with_input(text, 'count', '-') == (0, b'4\n', [])
        code, output, errors = run_with_input(text, 'check', '-')
        assert (code, output) == (2, b'')
        assert 'it is not a store' in errors[-1]

    @pytest.mark.parametrize('line', [b'?\n', b'\n', b'{"id":3,"name":"Ef'])
    def test_invalid_line_is_an_error(self, make, run_with_input, line):
        """A line that is no plant is an error with the number of the line."""
        text = lines(*many(1000)) + line
        code, output, errors = run_with_input(text, 'copy', '-', make('jsonl'))
        assert (code, counts(output)) == (1, (1000, 0, 0))
        reason = 'line 1001 is no plant: it is not JSON'
        assert errors == [f'Error: the standard input: {reason}']

    def test_unreadable_input_is_an_error(self, make, run, monkeypatch):
        """A standard input that cannot be read is an error of one line."""
        # As main() replaces a closed one.
        with os.fdopen(os.open(os.devnull, os.O_WRONLY)) as unreadable:
            monkeypatch.setattr(sys, 'stdin', unreadable)
            code, output, errors = run('copy', '-', make('jsonl'))
        assert (code, counts(output)) == (1, (0, 0, 0))
        assert errors == [f'Error: the standard input: {os.strerror(errno.EBADF)}']


class TestMissing:
    def test_missing_target_is_made(self, path, url, run):
        """A target that does not exist is made, also when there is nothing to copy."""
        for target in f'jsonl:{path}', url:
            assert run('copy', 'memory:', target)[0] == 0
            assert plants_in(target) == []

    def test_missing_store_is_not_made_by_a_reader(self, path, url, run):
        """A missing source or table is an error, and nothing is made."""
        code, output, errors = run('copy', path, url)
        assert (code, counts(output)) == (1, (0, 0, 0))
        assert errors == [f'Error: {path}: {os.strerror(errno.ENOENT)}']
        assert not path.exists()
        for name in 'list', 'check', 'list':
            code, _, (error,) = run(name, url)
            assert code == 1
            assert 'there is no table plants' in error

    def test_target_with_only_an_index_is_refused(self, path, run):
        """A target whose file is missing is not made again: it would forget ids."""
        fill(path, FERN)
        path.unlink()
        code, output, (error,) = run('copy', 'memory:', path)
        assert (code, counts(output)) == (1, (0, 0, 0))
        assert 'put it back, or remove plants.jsonl.index' in error
        assert not path.exists()


class TestInterrupted:
    """A copy that ends early keeps what it has copied, and may be repeated."""

    PLANTS = many(4500)

    @contextmanager
    def copying(self, target):
        """Copy from a pipe to a store, until the copy waits for the fourth batch."""

        def has_three_batches():
            with suppress(StoreUnavailable):
                return len(plants_in(target)) == 3000

        with command('copy', '-', target, stdin=subprocess.PIPE) as process:
            process.stdin.write(lines(*self.PLANTS[:3500]))
            process.stdin.flush()
            wait_until(has_three_batches, 'three batches are copied')
            yield process

    @pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
    def test_copy_that_is_interrupted_may_be_repeated(self, make, run, number):
        """A single Ctrl-C ends a copy that waits for its input; so does a kill."""
        target = make('jsonl')
        with self.copying(target) as process:
            process.send_signal(number)
            output, errors = process.communicate(timeout=PATIENCE)
        if number == signal.SIGINT:
            assert (process.returncode, errors) == (130, b'')
            # It may have stored the third batch, and not have counted it yet.
            assert counts(output) in ((2000, 0, 0), (3000, 0, 0))
        code, output, errors = run('copy', make('jsonl', *self.PLANTS), target)
        assert (code, counts(output), errors) == (0, (1500, 3000, 0), [])
        assert plants_in(target) == self.PLANTS

    def test_copy_waits_for_a_killed_database(self, database, url):
        """A copy to a database that is killed waits, and goes on when it is back."""
        with self.copying(url) as process:
            database.kill()
            try:
                process.stdin.write(lines(*self.PLANTS[3500:]))
                process.stdin.flush()
                printed = [process.stderr.readline().decode() for _ in range(2)]
            finally:
                database.start()
            output, _ = process.communicate(timeout=PATIENCE)
        assert re.fullmatch(r'.*: the table is store_\w+[.]plants\n', printed[0])
        assert re.fullmatch(r'Waiting: postgresql://.* the database.*\n', printed[1])
        assert (process.returncode, counts(output)) == (0, (4500, 0, 0))
        assert plants_in(url) == self.PLANTS


def test_lost_source_is_read_again(make, run, database, monkeypatch):
    """A copy reads a source again that went away, and counts what it reads last."""
    plants = [plant._replace(tag='shade' * 200) for plant in many(5_000)]
    # A Unix socket: a TCP connection may hold all of the plants when it is lost.
    host = quote(str(database.directory), safe='')
    source = make('postgresql', *plants).replace('127.0.0.1', host)
    target = make('jsonl')
    losses = iter([True, True])

    def lossy(plants):
        for number, batch in enumerate(batches(plants)):
            if number == 2 and next(losses, False):
                database.terminate_sessions()
            yield batch

    monkeypatch.setattr('store.__main__.batches', lossy)
    monkeypatch.setattr('store.__main__.RETRY_AFTER', 0.3)
    code, output, errors = run('copy', source, target)
    assert (code, [line[:22] for line in errors]) == (0, ['Waiting: postgresql://'] * 2)
    assert sum(counts(output)) == 5_000
    assert plants_in(target) == plants

    losses = repeat(True)
    code, output, errors = run('copy', '--wait', 1, source, target)
    assert (code, errors[-1][:6]) == (1, 'Error:')


def test_each_loss_of_a_store_has_its_own_wait(make, run, monkeypatch):
    """A copy waits anew for a target that came back, and no longer than it may."""
    clock, away, batches = [0.0], [], []
    monkeypatch.setattr('store.__main__.time.monotonic', lambda: 100 + clock[0])

    def sleep(seconds):
        clock[0] += seconds

    def add_many(store, plants):
        if away and clock[0] < away[0]:
            raise StoreUnavailable('it is \x1baway')
        batches.append(clock[0])
        away[:] = [clock[0] + seconds[len(batches) - 1]]
        return [True] * len(plants)

    monkeypatch.setattr('store.__main__.time.sleep', sleep)
    monkeypatch.setattr('store.memory.MemoryStore.add_many', add_many)
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)  # beside a progress bar
    seconds = [7, 7, 11]  # that the store is away after each batch
    arguments = ('copy', '--wait', 10, make('jsonl', *many(4000)), 'memory:')
    code, output, errors = run(*arguments)
    assert (code, counts(output)) == (1, (3000, 0, 0))
    assert batches == [0, 7, 14]
    assert clock == [24]
    waits = [line for line in errors if line == r'Waiting: it is \u001baway']
    assert len(waits) == 7 + 7 + 10


def test_damaged_source_ends_the_copy(path, make, run):
    """A damaged line ends the copy with its place; what was copied stays."""
    target, last, sound = make('jsonl'), Plant(-1, 'Moss'), lines(*many(2500))
    path.write_bytes(sound + b'{"id":"1"}\n' + lines(last))
    code, output, (error,) = run('copy', path, target)
    assert (code, counts(output)) == (1, (2000, 0, 0))
    assert error.startswith(f'Error: {path}: line 2501 (byte {len(sound)}) is damaged')
    assert f'--repair jsonl:{path}' in error
    assert plants_in(target) == many(2000)
    assert run('check', '--repair', path)[0] == 0
    code, output, _ = run('copy', path, target)
    assert (code, counts(output)) == (0, (501, 2000, 0))
    assert plants_in(target) == [last, *many(2500)]


def test_same_file_by_another_name_is_harmless(path, run):
    """A copy to the same file by another name finds all plants already there."""
    path.write_bytes(lines(*many(3000)))
    other = path.with_name('other.jsonl')
    other.hardlink_to(path)
    code, output, errors = run('copy', path, other)
    assert (code, counts(output), errors) == (0, (0, 3000, 0), [])
    assert path.read_bytes() == lines(*many(3000))


class TestOutput:
    @pytest.mark.parametrize('is_file', [True, False], ids=['file', 'directory'])
    def test_progress_bar_on_a_terminal(self, make, tmp_path, is_file):
        """A progress bar on a terminal does not mix with the other output."""
        source = make('jsonl', REED, *many(3000, 2))
        append(Path(source.partition(':')[2]), b'?\n' + lines(MOSS))
        master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 80))
        ends = {'stdout': terminal, 'stderr': terminal}
        shown = b''
        target = make('jsonl', FERN) if is_file else tmp_path
        with command('copy', source, target, **ends) as process:
            os.close(terminal)
            with suppress(OSError):  # read() fails at the end of a terminal
                while data := os.read(master, 4096):
                    shown += data
            process.wait(PATIENCE)
        os.close(master)
        assert re.search(rb'\d+%\|.*\| \d+/3\d\d\d \[', shown)
        assert b' plants/s' in shown
        printed = re.split(rb'[\r\n]+', shown)
        assert (b'conflicting: {"id":1,"name":"Reed"}' in printed) is is_file
        copied = b'copied: %d, already there: 0, conflicting: %d'
        assert copied % ((2999, 1) if is_file else (0, 0)) in printed
        assert any(line.startswith(b'Error: ') for line in printed)

    @pytest.mark.parametrize(
        ('name', 'printed'),
        [('check', b'3000 plants verified, no damage\n'), ('count', b'3000\n')],
    )
    def test_progress_bar_of_a_database(self, make, run, monkeypatch, name, printed):
        """Other commands show progress, too, of a database; none without tqdm."""
        url = make('postgresql', *many(3000))
        monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
        code, output, errors = run(name, url)
        assert (code, output) == (0, printed)
        assert any(re.search(r'\d+ plants \[', line) for line in errors)
        assert not errors[-1].strip()  # it is gone
        monkeypatch.setitem(sys.modules, 'tqdm', None)
        assert run(name, url) == (0, output, [])


def test_memory_of_a_copy_does_not_grow(make):
    """A copy of six times as many plants takes about the same memory."""
    plants = [plant._replace(tag='shade' * 400) for plant in many(12_000)]
    # Not ru_maxrss, which begins with that of the process that started this one.
    script = (
        'import sys; from store.__main__ import main\n'
        'for source, target in sys.argv[1:3], sys.argv[3:]:\n'
        "    assert main(['copy', source, target]) == 0\n"
        "    print(open('/proc/self/status').read())"
    )
    small, large = make('postgresql', *plants[:2_000]), make('postgresql', *plants)
    copies = [small, make('jsonl'), large, make('jsonl')]
    done = finished([sys.executable, '-c', script, *copies], cwd=REPOSITORY, check=True)
    first, both = map(int, re.findall(r'VmHWM:\s+(\d+) kB', done.stdout))
    # All plants as objects would take 20 MiB more, and the caches of the index take 5.
    assert both < first + 10 * 1024
