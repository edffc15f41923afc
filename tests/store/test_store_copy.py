"""The command line: copy between every pair of stores, with a real database."""

import errno
import fcntl
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import psycopg
import pytest
from cli import command, pipe_without_reader
from hypothesis import given, settings
from hypothesis import strategies as st
from postgresql import PostgreSQL
from psycopg.errors import UndefinedTable
from server import PATIENCE, REPOSITORY, RawClient, Server, request, wait_until

from store import Plant, StoreUnavailable, open_store
from store.__main__ import main
from store.jsonl import JSONLinesStore, record
from store.testing import HOSTILE, IDS, TEXTS, plane

KINDS = ['memory', 'jsonl', 'postgresql']
DURABLE = KINDS[1:]

FERN, MOSS, IVY = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Efeu ☘', '')
REED = Plant(1, 'Reed')

MANY = 10_000


@pytest.fixture
def make(tmp_path, server):
    """Return a function that makes a store of a kind, and returns its URL."""
    numbers = iter(range(100))

    def make(kind, *plants):
        if kind == 'memory':
            return 'memory:'
        if kind == 'jsonl':
            path = tmp_path / f'{next(numbers)}.jsonl'
            write(path, plants)
            return f'jsonl:{path}'
        url = server.new_url()
        with open_store(url) as store:
            store.ping()
            store.add_many(plants)
        return url

    return make


def write(path, plants):
    """Write a plant file without a store."""
    path.write_bytes(b''.join(map(record.encode, plants)))


def plants_in(url):
    """Return the plants of a store, in the order of their ids."""
    if url == 'memory:':
        return []
    with open_store(url, create='never') as store:
        return sorted(store)


def many(first=0, count=MANY):
    """Return many plants, with ids from ``first`` on."""
    return [Plant(id, 'Fern', 'shade') for id in range(first, first + count)]


def counts(output):
    """Return the counts of a copy: copied, already there, conflicting."""
    last = output.decode().splitlines()[-1]
    pattern = r'copied: (\d+), already there: (\d+), conflicting: (\d+)'
    return tuple(map(int, re.fullmatch(pattern, last).groups()))


def finish(process):
    """Wait for the end of a command; return its exit code, output and errors."""
    output, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, output, (errors or b'').decode()


@pytest.mark.parametrize('target', KINDS)
@pytest.mark.parametrize('source', KINDS)
class TestEveryPair:
    def test_copy_counts_plants(self, make, run, source, target):
        """The target gets the plants that it lacks, and keeps its own in conflicts."""
        source = make(source, REED, MOSS, IVY)
        target = make(target, FERN, MOSS)
        there = plants_in(target)
        given = plants_in(source)
        conflicts = [plant for plant in given if plant == REED and FERN in there]
        present = [plant for plant in given if plant in there]
        copied = [plant for plant in given if plant not in conflicts + present]
        listed = [b'conflicting: ' + record.encode(plant) for plant in conflicts]

        code, output, errors = run('copy', source, target)
        assert (code, errors) == (int(bool(conflicts)), [])
        assert output.splitlines(keepends=True)[:-1] == listed
        assert counts(output) == (len(copied), len(present), len(conflicts))
        if target != 'memory:':
            assert plants_in(target) == sorted(there + copied)
            again = run('copy', source, target)[1]
            assert counts(again) == (0, len(present + copied), len(conflicts))
            assert plants_in(target) == sorted(there + copied)
        assert plants_in(source) == given

    def test_copy_of_no_plants(self, make, run, source, target):
        """A copy of an empty store succeeds."""
        code, output, errors = run('copy', make(source), make(target))
        assert (code, counts(output), errors) == (0, (0, 0, 0), [])


@pytest.mark.parametrize('kind', DURABLE)
def test_list_prints_records(make, run, kind):
    """Each plant of a store is printed as a record."""
    code, output, errors = run('list', make(kind, FERN, MOSS, IVY))
    assert (code, errors) == (0, [])
    assert output.splitlines(keepends=True) == [
        record.encode(plant) for plant in (FERN, MOSS, IVY)
    ]


def test_reader_that_stops_ends_the_query(server, make):
    """When the reader of a list closes it early, the query ends too."""
    url = make('postgresql', *many(count=20_000))
    with command('list', url) as process:
        first = process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b''
        assert process.wait(PATIENCE) == 0
    assert first == record.encode(Plant(0, 'Fern', 'shade'))
    wait_until(
        lambda: (
            not server.execute(
                "SELECT 1 FROM pg_stat_activity WHERE application_name = 'plants' "
                "AND state = 'active' AND query LIKE '%FROM plants%'"
            )
        ),
        'the query ends',
    )


def test_check_reads_the_table(make, run):
    """A check reads every plant of a table."""
    url = make('postgresql', FERN, MOSS)
    assert run('check', url) == (0, b'2 plants verified, no damage\n', [])


@pytest.fixture
def run_with_input(run, monkeypatch):
    """Return a function that runs a command with a standard input."""

    def run_with_input(text, *arguments):
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(text)))
        return run(*arguments)

    return run_with_input


class TestPipe:
    TEXT = b''.join(map(record.encode, (FERN, MOSS, IVY)))

    @pytest.mark.parametrize('kind', DURABLE)
    def test_copy_through_pipes(self, make, run_with_input, kind):
        """A copy reads plants from a pipe, and writes plants to a pipe."""
        url = make(kind, FERN)
        code, output, errors = run_with_input(self.TEXT, 'copy', '-', url)
        assert (code, counts(output), errors) == (0, (2, 1, 0), [])
        assert plants_in(url) == [FERN, MOSS, IVY]
        code, output, errors = run_with_input(b'', 'copy', url, '-')
        assert (code, output) == (0, self.TEXT)
        assert errors == ['copied: 3, already there: 0, conflicting: 0']

    def test_copy_from_pipe_to_pipe(self, run_with_input):
        """A copy from pipe to pipe turns lines written by hand into records."""
        by_hand = b'{ "name": "Fern", "id": 1, "note": 1 }\r\n'
        code, output, errors = run_with_input(by_hand, 'copy', '-', '-')
        assert (code, output) == (0, record.encode(FERN))
        assert errors == ['copied: 1, already there: 0, conflicting: 0']

    def test_missing_last_line_feed_is_accepted(self, make, run_with_input):
        """The last line of a pipe need not end with a line feed."""
        target = make('jsonl')
        code, _, _ = run_with_input(self.TEXT.removesuffix(b'\n'), 'copy', '-', target)
        assert code == 0
        assert plants_in(target) == [FERN, MOSS, IVY]

    @pytest.mark.parametrize('line', [b'?\n', b'\n', b'{"id":3,"name":"Ef'])
    def test_invalid_line_is_an_error(self, make, run_with_input, line):
        """A line that is no plant is an error with the number of the line."""
        text = record.encode(FERN) + line
        code, output, errors = run_with_input(text, 'copy', '-', make('jsonl'))
        assert (code, counts(output)) == (1, (0, 0, 0))
        reason = 'line 2 is no plant: it is not JSON'
        assert errors == [f'Error: the standard input: {reason}']

    def test_other_commands_read_a_pipe(self, run_with_input):
        """Plants from a pipe can be listed and counted, but not checked."""
        assert run_with_input(self.TEXT, 'list', '-') == (0, self.TEXT, [])
        assert run_with_input(self.TEXT, 'count', '-') == (0, b'3\n', [])
        code, output, errors = run_with_input(self.TEXT, 'check', '-')
        assert (code, output) == (1, b'')
        assert errors == ['Error: the standard input: only a file can be checked']

    def test_unreadable_input_is_an_error(self, make, run, monkeypatch):
        """A standard input that cannot be read is an error of one line."""
        # As main() replaces a closed one.
        with os.fdopen(os.open(os.devnull, os.O_WRONLY)) as unreadable:
            monkeypatch.setattr(sys, 'stdin', unreadable)
            code, output, errors = run('copy', '-', make('jsonl'))
        assert (code, counts(output)) == (1, (0, 0, 0))
        assert errors == [f'Error: the standard input: {os.strerror(errno.EBADF)}']

    def test_reader_that_stops_is_no_error(self, make):
        """The reader of the output may close it early, as head does."""
        with command('copy', make('jsonl', *many()), '-') as process:
            first = process.stdout.readline()
            process.stdout.close()
            errors = process.stderr.read()
            assert process.wait(PATIENCE) == 0
        assert first == record.encode(many(count=1)[0])
        assert counts(errors)[1:] == (0, 0)

    def test_one_interrupt_ends_a_wait_for_input(self, make):
        """A single Ctrl-C ends a copy that waits for its input."""
        target = make('jsonl')
        with command('copy', '-', target, stdin=subprocess.PIPE) as process:
            process.stdin.write(self.TEXT * 10_000)
            process.stdin.flush()
            path = Path(target.partition(':')[2])
            wait_until(lambda: path.stat().st_size, 'the copy has begun')
            wait_until(lambda: is_sleeping(process.pid), 'the copy waits')
            process.send_signal(signal.SIGINT)
            code = process.wait(PATIENCE)
            output = process.stdout.read()
        assert code == 130
        assert counts(output)[0] == 3


class TestMissing:
    @pytest.mark.parametrize('target', KINDS)
    def test_missing_target_is_made(self, tmp_path, url, run, target):
        """A target that does not exist is made, also when there is nothing to copy."""
        path = tmp_path / 'new.jsonl'
        targets = {'memory': 'memory:', 'jsonl': f'jsonl:{path}', 'postgresql': url}
        assert run('copy', 'memory:', targets[target])[0] == 0
        assert path.exists() == (target == 'jsonl')
        if target == 'postgresql':
            assert plants_in(url) == []

    @pytest.mark.parametrize('create', [True, False], ids=['create', 'no-create'])
    @pytest.mark.parametrize('arguments', [['list'], ['check'], ['copy']], ids=str)
    def test_missing_table_of_the_source_is_not_made(
        self, tmp_path, server, url, run, arguments, create
    ):
        """A missing table is an error for a command that reads, and is not made."""
        schema = url.rpartition('%3D')[2]
        if not create:
            server.execute(f'CREATE ROLE {schema} LOGIN')
            server.execute(f'GRANT USAGE ON SCHEMA {schema} TO {schema}')
            url = url.replace('gardener', schema)
        target = tmp_path / 'new.jsonl'
        targets = [f'jsonl:{target}'] if arguments == ['copy'] else []
        code, output, (error,) = run(*arguments, url, *targets)
        assert code == 1
        assert 'there is no table plants' in error
        assert output in (b'', b'copied: 0, already there: 0, conflicting: 0\n')
        assert not target.exists()
        assert server.execute(f"SELECT to_regclass('{schema}.plants')") == [(None,)]

    def test_missing_source_makes_no_target(self, tmp_path, url, run):
        """A missing source file is an error, and the target is not made."""
        missing = tmp_path / 'missing.jsonl'
        code, output, errors = run('copy', f'jsonl:{missing}', url)
        assert (code, counts(output)) == (1, (0, 0, 0))
        assert errors == [f'Error: {missing}: {os.strerror(errno.ENOENT)}']
        assert not missing.exists()
        with (
            open_store(url, create='never') as store,
            pytest.raises(StoreUnavailable, match='no table'),
        ):
            store.ping()

    @pytest.mark.parametrize('source', KINDS)
    def test_target_with_only_an_index_is_refused(self, tmp_path, make, run, source):
        """A target whose file is missing is not made again: it would forget ids."""
        target = tmp_path / 'lost.jsonl'
        with open_store(f'jsonl:{target}') as store:
            store.add(FERN)
        target.unlink()
        code, output, (error,) = run('copy', make(source, MOSS), f'jsonl:{target}')
        assert (code, counts(output)) == (1, (0, 0, 0))
        assert 'put it back, or remove lost.jsonl.index' in error
        assert not target.exists()

    @pytest.mark.parametrize('source', KINDS)
    def test_missing_directory_is_not_made(self, tmp_path, make, run, source):
        """A target in a missing directory is an error, and nothing is made."""
        target = tmp_path / 'missing' / 'plants.jsonl'
        code, output, (error,) = run('copy', make(source, MOSS), f'jsonl:{target}')
        assert (code, counts(output)) == (1, (0, 0, 0))
        assert error == f'Error: {target}: its directory does not exist'
        assert not target.parent.exists()

    def test_target_that_links_to_itself_is_an_error(self, tmp_path, run):
        """A target that is a link to itself is an error of one line."""
        (tmp_path / 'loop').symlink_to('loop')
        code, _, (error,) = run('copy', 'memory:', f'jsonl:{tmp_path}/loop')
        assert code == 1
        assert os.strerror(errno.ELOOP) in error


class TestInterrupted:
    @pytest.fixture(params=['jsonl-postgresql', 'postgresql-jsonl'])
    def pair(self, request, make):
        """A source with many plants, and a target with none."""
        source, _, target = request.param.partition('-')
        return make(source, *many()), make(target)

    @pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL], ids=str)
    def test_interrupted_copy_can_be_repeated(self, server, pair, number):
        """A copy ended by a signal keeps what it copied; a repeat copies the rest."""
        source, target = pair
        with command('copy', source, target) as process:
            with blocked(server, target):
                process.send_signal(number)
            code, output, errors = finish(process)
        there = len(plants_in(target))
        assert 0 < there < MANY
        if number == signal.SIGINT:
            assert (code, errors) == (130, '')
            # The last batch may be stored without being counted.
            assert counts(output)[0] in (there, there - 1000)
        with command('copy', source, target) as process:
            code, output, errors = finish(process)
        assert (code, errors) == (0, '')
        assert counts(output) == (MANY - there, there, 0)
        assert plants_in(target) == plants_in(source)

    def test_interrupted_copy_finishes_its_batch(self, make, run, monkeypatch):
        """After Ctrl-C the current batch is finished and counted, and is the last."""
        add_many = JSONLinesStore.add_many

        def interrupted(store, plants):
            signal.raise_signal(signal.SIGINT)
            return add_many(store, plants)

        source, target = make('jsonl', *many(count=3000)), make('jsonl')
        monkeypatch.setattr(JSONLinesStore, 'add_many', interrupted)
        code, output, errors = run('copy', source, target)
        assert (code, counts(output), errors) == (130, (1000, 0, 0), [])
        assert len(plants_in(target)) == 1000
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_interrupt_at_the_start_of_a_batch_is_noted(self, make, run, monkeypatch):
        """A Ctrl-C that comes as soon as it is held back is like a later one."""
        install = signal.signal

        def interrupted(number, handler):
            before = install(number, handler)
            if handler is not signal.default_int_handler:
                signal.raise_signal(number)
            return before

        source, target = make('jsonl', *many(count=3000)), make('jsonl')
        monkeypatch.setattr(signal, 'signal', interrupted)
        code, output, errors = run('copy', source, target)
        assert (code, counts(output), errors) == (130, (1000, 0, 0), [])

    def test_batches_are_limited(self, make, run, monkeypatch):
        """A batch has a limited number of plants, and of characters."""
        sizes = []
        add_many = JSONLinesStore.add_many

        def note(store, plants):
            sizes.append(len(plants))
            return add_many(store, plants)

        monkeypatch.setattr(JSONLinesStore, 'add_many', note)
        long = 'Fern' * 2**12
        plants = [*many(count=2500), *(Plant(-id, long, long) for id in range(1, 101))]
        target = make('jsonl')
        code, output, _ = run('copy', make('jsonl', *plants), target)
        assert (code, counts(output)) == (0, (2600, 0, 0))
        # The 500 short plants have less text than one long plant.
        assert sizes == [1000, 1000, 500 + 32, 32, 32, 4]
        assert plants_in(target) == sorted(plants)

    @pytest.mark.parametrize('way', ['to', 'from'])
    def test_killed_database_ends_the_copy(self, tmp_path, way):
        """A database that is killed ends the copy; a repeat copies the rest."""
        path = tmp_path / 'plants.jsonl'
        # More bytes than the buffers between the two stores hold.
        plants = [plant._replace(tag='shade' * 400) for plant in many()]
        with PostgreSQL() as server:
            pair = [f'jsonl:{path}', server.url()]
            if way == 'to':
                write(path, plants)
            else:
                with open_store(server.url()) as store:
                    store.add_many(plants)
                pair.reverse()
            with command('copy', *pair) as process:
                with blocked(server, pair[1]):
                    server.kill()
                code, output, errors = finish(process)
            assert code == 1
            assert re.fullmatch(r'Error: postgresql://.* the database.*\n', errors)
            copied = counts(output)[0]
            server.start()
            there = len(plants_in(pair[1]))
            assert copied <= there <= copied + 1000
            with command('copy', *pair) as process:
                code, output, errors = finish(process)
            assert (code, errors) == (0, '')
            assert counts(output) == (MANY - there, there, 0)
            assert plants_in(pair[1]) == plants


def is_sleeping(pid):
    """Return whether a process sleeps for 100 ms."""
    status = Path(f'/proc/{pid}/stat')
    for _ in range(20):
        if ') S ' not in status.read_text():
            return False
        time.sleep(0.005)
    return True


@contextmanager
def blocked(server, target):
    """Block a copy in the middle, once it has begun."""
    if target.startswith('jsonl'):
        path = Path(target.partition(':')[2])
        # NOTE: not wait_until(), which polls every 10 ms: the copy may be over by then.
        while not path.exists() or not path.stat().st_size:
            time.sleep(0.000_2)
        with path.open('rb') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    else:
        with psycopg.connect(target) as connection:
            wait_until(lambda: table_size(server, target), 'the copy has begun')
            # An uncommitted row: the copy waits when it comes to the same id.
            connection.execute("INSERT INTO plants VALUES (%s, 'Fern')", [MANY - 1])
            yield
            with suppress(psycopg.OperationalError):
                connection.rollback()


def table_size(server, url):
    """Return the number of plants in a table, or 0 if there is no table."""
    with suppress(UndefinedTable):
        return server.execute('SELECT count(*) FROM plants', url=url)[0][0]
    return 0


class TestRefused:
    @pytest.mark.parametrize('target', DURABLE)
    def test_damaged_source_ends_the_copy(self, make, run, target):
        """A damaged line ends the copy with its place; what was copied stays."""
        source, target = make('jsonl', *many(count=2500)), make(target)
        path = Path(source.partition(':')[2])
        sound = path.read_bytes()
        last = Plant(-1, 'Moss')
        path.write_bytes(sound + b'{"id":"1"}\n' + record.encode(last))
        code, output, (error,) = run('copy', source, target)
        assert (code, counts(output)) == (1, (2000, 0, 0))
        assert f'line 2501 (byte {len(sound)}) is damaged: its id is not' in error
        assert plants_in(target) == many(count=2000)
        assert run('check', '--repair', source)[0] == 0
        code, output, _ = run('copy', source, target)
        assert (code, counts(output)) == (0, (501, 2000, 0))
        assert plants_in(target) == [last, *many(count=2500)]

    def test_plant_that_breaks_a_rule_ends_the_copy(self, server, url, make, run):
        """A plant that breaks a rule of the table ends the copy, and is named."""
        with open_store(url) as store:
            store.ping()
        server.execute("ALTER TABLE plants ADD CHECK (name <> 'Moss')", url=url)
        code, output, (error,) = run('copy', make('jsonl', FERN, MOSS, IVY), url)
        assert (code, counts(output)) == (1, (0, 0, 0))
        assert 'a rule of the table plants does not permit it' in error
        assert 'Failing row contains (2, Moss, shade)' in error
        assert plants_in(url) == [FERN, IVY]


class TestUsage:
    @pytest.mark.parametrize('kind', ['memory', 'postgresql'])
    def test_only_a_file_is_repaired(self, make, run, kind):
        """--repair is refused for a store without a file."""
        code, output, errors = run('check', '--repair', make(kind))
        assert (code, output) == (2, b'')
        assert errors[-1].endswith('error: --repair is for a file of JSON lines')

    def test_same_file_is_refused(self, make, run):
        """A file is not copied to itself."""
        url = make('jsonl', FERN)
        path = url.partition(':')[2]
        for pair in [(url, url), (path, url), (path, path)]:
            code, output, errors = run('copy', *pair)
            assert (code, output) == (2, b'')
            assert errors[-1].endswith('error: SRC and DST are the same store')

    @pytest.mark.parametrize('other', ['dots', 'link', 'hard-link'])
    def test_same_file_by_another_name_is_harmless(self, make, run, other):
        """A copy to the same file by another name finds all plants already there."""
        url = make('jsonl', *many(count=3000))
        path = Path(url.partition(':')[2])
        before = path.read_bytes()
        name = path.with_name('other.jsonl')
        match other:
            case 'dots':
                name = f'{path.parent}/../{path.parent.name}/{path.name}'
            case 'link':
                name.symlink_to(path)
            case 'hard-link':
                name.hardlink_to(path)
        for pair in [(url, f'jsonl:{name}'), (f'jsonl:{name}', url)]:
            code, output, errors = run('copy', *pair)
            assert (code, counts(output), errors) == (0, (0, 3000, 0), [])
        assert path.read_bytes() == before

    def test_same_database_is_refused(self, url, run):
        """A database is not copied to itself."""
        code, _, errors = run('copy', url, url)
        assert code == 2
        assert errors[-1].endswith('error: SRC and DST are the same store')

    @pytest.mark.parametrize(
        ('arguments', 'message'),
        [
            ([], 'SRC, DST'),
            (['memory:'], 'DST'),
            (['memory:', 'memory:', 'jsonl:x'], 'jsonl:x'),
            (['memory:', ''], "'' is not a store"),
            (['csv:x', 'memory:'], "'csv:x' is not a store"),
            (['x', 'password=x'], "'password=***' is not a store"),
            (['memory:', 'postgresql://[h/d'], 'it is not a URL that libpq accepts'),
        ],
        ids=str,
    )
    def test_wrong_command_is_refused(self, run, arguments, message):
        """A wrong command ends with a reason and exit code 2."""
        code, output, errors = run('copy', *arguments)
        assert (code, output) == (2, b'')
        assert message in errors[-1]
        assert not any('Traceback' in line for line in errors)

    @pytest.mark.parametrize('name', ['list', 'check'])
    def test_unescaped_password_is_explained(self, run, name):
        """The error for an unescaped password is shown in full."""
        *_, error = run(name, 'postgresql://gardener:hu@sh@host/plants')[2]
        assert "'postgresql://***@host/plants': " in error
        assert 'write @ as %40, except before the host' in error

    @given(
        template=st.sampled_from(
            [
                'postgresql://gardener:{}@127.0.0.1:1/plants',
                'postgres://gardener:{}@127.0.0.1:1,127.0.0.1:2/plants',
                'postgresql://127.0.0.1:1/plants?password={}',
                'postgress://gardener:{}@127.0.0.1:1/plants',
                'postgresql:gardener:{}@127.0.0.1:1/plants',
                'host=127.0.0.1 port=1 password={}',
            ]
        ),
        around=st.tuples(*[st.text('@/?#%:[]&= \'"\\\n.x', max_size=4)] * 2),
    )
    @settings(max_examples=60, deadline=None)
    def test_no_error_shows_a_password(self, template, around):
        """No error about a URL shows its password, however malformed the URL is."""
        url = template.format('hush'.join(around))
        for arguments in (['list', url], ['check', url], ['copy', 'memory:', url]):
            assert 'hush' not in errors_of(arguments)

    @pytest.mark.parametrize('before', ['', '--repair='])
    @pytest.mark.parametrize('first', [[], ['list', 'memory:'], ['check', 'memory:']])
    @pytest.mark.parametrize(
        'url', ['postgresql://u:hush@h/d', 'postgresql://h/d?password=hush']
    )
    def test_misplaced_url_shows_no_password(self, first, before, url):
        """The error about a URL where none is expected shows no password."""
        assert 'hush' not in errors_of([*first, before + url])


def errors_of(arguments):
    """Return the error output of a command that is refused."""
    with redirect_stderr(io.StringIO()) as errors, suppress(SystemExit):
        assert main(arguments) == 1
    assert errors.getvalue()
    return errors.getvalue()


class TestOutput:
    @pytest.fixture
    def pair(self, make):
        """Stores with more conflicts than fit in a pipe and its buffers."""
        conflicts = [Plant(id, 'Moss') for id in range(5000)]
        source = make('jsonl', *many(count=5000), *many(-3000, 3000))
        return source, make('jsonl', *conflicts)

    def test_copy_goes_on_without_a_reader(self, pair):
        """A closed pipe for the output does not end the copy."""
        writer = pipe_without_reader()
        with command('copy', *pair, stdout=writer) as process:
            os.close(writer)
            code, _, errors = finish(process)
        assert (code, errors) == (1, '')
        assert plants_in(pair[1])[:3000] == many(-3000, 3000)

    def test_output_on_a_full_disk(self, make):
        """An output that cannot be written is an error of one line."""
        target = make('jsonl')
        with (
            open('/dev/full', 'wb') as full,
            command('copy', make('jsonl', FERN), target, stdout=full) as process,
        ):
            code, _, errors = finish(process)
        assert (code, errors) == (
            1,
            f'Error: the output: {os.strerror(errno.ENOSPC)}\n',
        )
        assert plants_in(target) == [FERN]

    def test_no_progress_bar_in_a_pipe(self, pair):
        """Without a terminal there is no progress bar."""
        with command('copy', *pair) as process:
            code, output, errors = finish(process)
        assert (code, errors) == (1, '')
        assert counts(output) == (3000, 0, 5000)

    def test_progress_bar_on_a_terminal(self, make):
        """A progress bar on a terminal does not mix with the other output."""
        source = make('jsonl', REED, *many(2, 3000))
        shown = on_terminal('copy', source, make('jsonl', FERN))
        assert re.search(rb'\d+%\|.*\| \d+/3\d\d\d \[', shown)
        assert b' plants/s' in shown
        lines = re.split(rb'[\r\n]+', shown)
        assert b'conflicting: {"id":1,"name":"Reed"}' in lines
        assert b'copied: 3000, already there: 0, conflicting: 1' in lines

    @pytest.mark.parametrize('name', ['check', 'count'])
    @pytest.mark.parametrize(
        ('kind', 'bar'),
        [('jsonl', rb'\d+%\|.*\| \d+/\d+ \['), ('postgresql', rb'\d+ plants \[')],
    )
    def test_progress_bar_of_check_and_count(self, make, name, kind, bar):
        """Other commands that read all plants show a progress bar, too."""
        shown = on_terminal(name, make(kind, *many()))
        assert re.search(bar, shown)
        assert b'%d' % MANY in re.split(rb'[\r\n]+', shown)[-2]

    def test_progress_bar_ends_before_an_error(self, make):
        """An error of the source begins on a new line."""
        source = make('jsonl', *many(count=2000))
        path = Path(source.partition(':')[2])
        path.write_bytes(path.read_bytes() + b'?\n' + record.encode(FERN))
        lines = re.split(rb'[\r\n]+', on_terminal('copy', source, make('jsonl')))
        assert any(line.startswith(b'Error: ') for line in lines)
        assert b'copied: 2000, already there: 0, conflicting: 0' in lines

    def test_no_progress_bar_without_tqdm(self, make, run, monkeypatch):
        """Without the package tqdm commands work, only without a progress bar."""
        url = make('jsonl', FERN)
        monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
        code, output, errors = run('count', url)
        assert (code, output) == (0, b'1\n')
        assert any(' plants' in line for line in errors)
        monkeypatch.setitem(sys.modules, 'tqdm', None)
        assert run('count', url) == (0, b'1\n', [])


def on_terminal(*arguments):
    """Run a command on a terminal; return what it prints."""
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    shown = b''
    with command(*arguments, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        with suppress(OSError):  # read() fails at the end of a terminal
            while data := os.read(master, 4096):
                shown += data
        process.wait(PATIENCE)
    os.close(master)
    return shown


@pytest.mark.parametrize('pair', [('jsonl', 'postgresql'), ('postgresql', 'jsonl')])
def test_memory_of_a_copy_does_not_grow(make, pair):
    """A copy of ten times as many plants takes about the same memory."""
    plants = [plant._replace(tag='shade' * 100) for plant in many(count=20_000)]
    sources = [make(pair[0], *plants[:count]) for count in (2_000, 20_000)]
    few, several = (peak_memory('copy', source, make(pair[1])) for source in sources)
    # All plants as objects would take 12 MiB more.
    assert several < few + 5


def peak_memory(*arguments):
    """Return the largest resident memory of a command, in MiB."""
    script = (
        'import resource, sys; from store.__main__ import main; code = main();'
        'print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)'
    )
    done = subprocess.run(
        [sys.executable, '-c', script, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=PATIENCE,
        check=True,
    )
    return int(done.stdout.split()[-1]) / 1024


PLANTS = st.lists(
    st.builds(
        Plant,
        st.sampled_from(IDS) | st.integers(-(2**63), 2**63 - 1),
        TEXTS | st.sampled_from(list(HOSTILE.values())),
        st.none() | TEXTS,
    ),
    unique_by=lambda plant: plant.id,
    max_size=30,
)


class TestThereAndBack:
    @given(plants=PLANTS)
    @settings(max_examples=25, deadline=None)
    def test_any_plants(self, tmp_path_factory, server, plants):
        """Plants come back from the database byte for byte."""
        self.copy_and_compare(tmp_path_factory.mktemp('copy'), server.new_url(), plants)

    def test_every_character(self, tmp_path, url):
        """Every character of Unicode comes back from the database."""
        planes = [Plant(number, plane(number), plane(number)) for number in range(17)]
        self.copy_and_compare(tmp_path, url, planes)

    def copy_and_compare(self, directory, url, plants):
        there, back = directory / 'there.jsonl', directory / 'back.jsonl'
        write(there, plants)
        assert main(['copy', f'jsonl:{there}', url]) == 0
        assert main(['copy', url, f'jsonl:{back}']) == 0
        lines = back.read_bytes().splitlines(keepends=True)
        assert sorted(lines) == sorted(there.read_bytes().splitlines(keepends=True))


class Clients:
    """Clients that keep adding plants, and retry each until it is acknowledged."""

    def __init__(self, count=4):
        self.port = None
        self.acknowledged = []
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=[number], daemon=True)
            for number in range(count)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info):
        self._done.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, number):
        for turn in range(10**6):
            plant = Plant(number * 10**6 + turn, f'{number} {turn}')
            body = {'id': plant.id, 'name': plant.name}
            while not self._is_acknowledged(request(body=body)):
                if self._done.wait(0.01):
                    return
            self.acknowledged.append(plant)
            if self._done.is_set():
                return

    def _is_acknowledged(self, data):
        with suppress(OSError), RawClient(self.port) as client:
            answer = client.ask(data)
            assert answer is None or answer.status in (200, 503)
            return answer is not None and answer.status == 200
        return False


def test_migration_to_a_database_loses_no_plant(tmp_path, url):
    """The steps in docs/migrating.md lose no plant, under load."""
    copy = ['copy', f'jsonl:{tmp_path}/plants.jsonl', url]
    with Clients() as clients:
        with Server(tmp_path, workers=2) as server:
            clients.port = server.port
            wait_until(lambda: len(clients.acknowledged) > 200, 'plants are added')
            with command(*copy) as process:
                code, output, errors = finish(process)
            assert (code, errors) == (0, '')
            first = counts(output)[0]
            assert first > 200
            more = len(clients.acknowledged) + 200
            wait_until(
                lambda: len(clients.acknowledged) > more, 'more plants are added'
            )
            server.signal(signal.SIGTERM)
            server.wait()
        with command(*copy) as process:
            code, output, errors = finish(process)
        assert (code, errors) == (0, '')
        copied, present, conflicting = counts(output)
        assert (present, conflicting) == (first, 0)
        assert copied > 0
        more = len(clients.acknowledged) + 200
        with Server(tmp_path, workers=2, PLANTS_STORE=url) as server:
            clients.port = server.port
            wait_until(
                lambda: len(clients.acknowledged) > more, 'plants are added again'
            )
    there = plants_in(url)
    assert set(clients.acknowledged) <= set(there)
    assert len(there) <= len(clients.acknowledged) + 4
