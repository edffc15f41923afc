"""The command line over plant files: list, check and repair; its output."""

import errno
import gzip
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from contract import IDS
from disk import Fault, append, assert_stored, failing, files, take_side_files
from disk import lines as records
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import locked
from server import REPOSITORY, command, finished
from waiting import PATIENCE

from store import Plant, StoreCorrupt, StoreUnavailable, open_store
from store.__main__ import main
from store.jsonl import record
from store.jsonl.repair import Verified, verify

FERN = b'{"id":1,"name":"Fern"}\n'
MOSS = b'{"id":2,"name":"Moss","tag":"shade"}\n'
SOUND = FERN + MOSS

# What others write, and what a disk leaves in the middle: nothing that a crash can
# leave at the end of the file.
DAMAGE = {
    'null tag, as jq writes it': b'{"id":3,"name":"Ivy","tag":null}\n',
    'the same without a line feed': b'{"id":3,"name":"Ivy","tag":null}',
    'text as id': b'{"id":"3","name":"Ivy"}\n',
    'array': b'{"id":3,"name":"Ivy"},\n',
    'Latin-1': b'{"id":3,"name":"Efeu \xe9"}\n',
    'UTF-16': '{"id":3,"name":"Ivy"}\r\n'.encode('utf-16'),
    'no JSON': b'?\n',
    'half a line': b'{"id":3,"na\n',
}
# Lines of every kind, for a repair: also a repeat, and a second plant with an id.
RIVAL = b'{"id":1,"name":"Reed"}\n'
REPEAT = b'{ "name": "Fern", "id": 1, "note": "twice" }\r\n'
LINES = [FERN, MOSS, RIVAL, REPEAT, bytes(600) + b'\n', *DAMAGE.values()]
LINES = [line for line in LINES if line.endswith(b'\n')]


class TestReaders:
    """list, check and copy read all plants of a file, or end with an error."""

    def test_list_prints_records(self, path, run):
        """Every id has its 64 bits, a line by hand becomes one of ours."""
        plants = [Plant(id, 'Efeu ☘', 'shade') for id in IDS]
        path.write_bytes(records(*plants) + b'\n' + b' ' + FERN)
        assert run('list', path) == (0, records(*plants) + FERN, [])
        assert [*files(path)] == [path.name]

    @pytest.mark.parametrize('damage', DAMAGE.values(), ids=DAMAGE)
    @pytest.mark.parametrize('follows', [b'', MOSS], ids=['at the end', 'before'])
    def test_damaged_file_is_an_error(self, path, run, damage, follows):
        """They end with 1 and name the line, whatever follows it; so does a start."""
        text = SOUND + damage + follows
        path.write_bytes(text)
        for words in ('list', path), ('check', path), ('copy', path, 'memory:'):
            code, output, errors = run(*words)
            assert code == 1, words
            assert 'line 3 (byte 60)' in output.decode() + ''.join(errors), words
        with open_store(f'jsonl:{path}') as opened, pytest.raises(StoreCorrupt):
            opened.ping()
        assert files(path) == {path.name: text}

    @pytest.mark.parametrize('name', ['file/x', 'x' * 300, 'missing', 'pipe', '.'])
    @pytest.mark.parametrize('words', ['list', 'check', 'check --repair', 'copy'])
    def test_missing_store_is_not_made(self, tmp_path, run, words, name):
        """What is no plant file is an error; nothing is made, or waited for."""
        (tmp_path / 'file').touch()
        os.mkfifo(tmp_path / 'pipe')
        target = [tmp_path / 'target.jsonl'] * (words == 'copy')
        code, output, errors = run(*words.split(), tmp_path / name, *target)
        assert (code, output) == (1, b'')
        assert errors[-1].startswith(f'Error: {(tmp_path / name).resolve()}: ')
        assert {entry.name for entry in tmp_path.iterdir()} == {'file', 'pipe'}

    def test_plain_path_is_a_plant_file(self, path, run, monkeypatch):
        """A path without a scheme is a plant file, also one that is made."""
        monkeypatch.chdir(path.parent)
        for number, name in enumerate(['plants.jsonl', './a:b', 'memory', '1@2 3é']):
            (path.parent / name).write_bytes(FERN)
            assert run('list', f' {name}\r\n') == (0, FERN, [])
            assert run('copy', name, f'new-{number}')[0] == 0
            assert path.with_name(f'new-{number}').read_bytes() == FERN
        assert run('copy', 'plants.jsonl', '-')[0] == 2
        assert not path.with_name('-').exists()

    def test_default_is_the_store_of_the_service(self, path, run, monkeypatch):
        """The default URL is the one in PLANTS_STORE, otherwise plants.jsonl."""
        monkeypatch.chdir(path.parent)
        monkeypatch.delenv('PLANTS_STORE', raising=False)
        path.write_bytes(FERN)
        path.with_name('other').write_bytes(MOSS)
        assert run('list') == (0, FERN, [])
        monkeypatch.setenv('PLANTS_STORE', 'jsonl:other\r')
        assert run('list') == (0, MOSS, [])
        assert run('check', '--repair')[0] == 0
        assert run('list', 'plants.jsonl') == (0, FERN, [])


# Files that are not plant files: nothing touches them, not even a repair.
FOREIGN = {
    'text': (REPOSITORY / 'README.md').read_bytes(),
    'objects': b'{"id":7,"title":"Fern"}\n' * 2,
    'array': b'[\n' + FERN.strip() + b',\n' + MOSS + b']\n',
    'sqlite': b'SQLite format 3\0\x10\0\x01\x01\0\x40\x20\x20' + bytes(4074),
    'gzip': gzip.compress(SOUND),
}


@pytest.mark.parametrize('content', FOREIGN.values(), ids=FOREIGN)
def test_file_of_something_else_is_refused(path, run, content):
    """Each command and a start refuse a file without a plant, and change nothing."""
    path.write_bytes(content)
    for words in 'list', 'check', 'check --repair', 'copy memory:':
        code, _, errors = run(*words.split(), path)
        assert (code, len(errors)) == (1, 1), words
    with open_store(f'jsonl:{path}') as opened, pytest.raises(StoreUnavailable):
        opened.ping()
    assert files(path) == {path.name: content}


class TestCheck:
    @settings(max_examples=40)
    @given(
        st.lists(st.sampled_from(LINES), max_size=12),
        st.sampled_from([b'', b'{"id":', b'{"id":3,"na\0\0']),
    )
    def test_repair_keeps_every_plant(self, tmp_path_factory, lines, torn):
        """Damaged lines go to a side file; the others stay where they are."""
        path = tmp_path_factory.mktemp('repair') / 'plants.jsonl'
        text = b''.join([FERN, *lines, torn])
        path.write_bytes(text)
        plants, expected, damaged = {}, [], []
        for line in [FERN, *lines, *([torn] if torn else [])]:
            try:
                plant = record.decode(line)
                is_sound = plants.setdefault(plant.id, plant) == plant
            except record.DamagedRecord:
                is_sound = False
            (expected if is_sound else damaged).append(line)
        assert main(['check', str(path)]) == int(bool(damaged))
        assert files(path) == {path.name: text}
        assert main(['check', '--repair', str(path)]) == 0
        assert take_side_files(path) == [b''.join(damaged)] * bool(damaged)
        repaired = path.read_bytes()
        assert len(repaired) == len(text)
        kept = [line for line in repaired.splitlines(keepends=True) if line.strip()]
        assert kept == expected
        assert main(['check', str(path)]) == 0
        assert_stored(path, [*plants.values()], free=[10])

    def test_repair_names_lines_and_side_file(self, path, run):
        """A second repair has a side file of its own; links, mode and inode stay."""
        link = path.with_name('link')
        link.symlink_to(path)
        path.touch(0o640)
        before = path.stat()
        for number in 1, 2:
            append(path, b'?%d\n' % number + records(Plant(number, 'Fern')))
            code, output, _ = run('check', '--repair', link)
            side = path.with_name(f'{path.name}.damaged-{number}')
            assert code == 0
            assert f'line {2 * number - 1} (byte ' in output.decode()
            assert f'{side}' in output.decode()
            assert side.read_bytes() == b'?%d\n' % number
        after = path.stat()
        assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
        assert link.is_symlink()

    @pytest.mark.parametrize('call', ['open', 'pwrite', 'fsync', 'fdatasync'])
    @pytest.mark.parametrize('error', [failing(errno.ENOSPC), KeyboardInterrupt])
    def test_repair_that_fails_loses_nothing(self, path, run, disk, call, error):
        """What a failed or interrupted repair leaves, the next one mends."""

        def fail(*arguments):
            raise error if error is KeyboardInterrupt else error(*arguments)

        for nth in range(1, 30):
            path.write_bytes(FERN + b'?\n' + MOSS)
            disk.before = Fault(call, nth, fail)
            code, *_ = run('check', '--repair', path)
            if not (reached := disk.before.reached):
                break
            disk.resume()
            assert code in (1, 130)
            assert run('check', '--repair', path)[0] == 0
            assert run('list', path)[:2] == (0, SOUND)
            assert b'?\n' in take_side_files(path)
        assert (code, reached) == (0, False)
        assert nth > 1

    def test_check_beside_a_server(self, path):
        """A check blocks no add, and waits for a line that is being written."""
        with open_store(f'jsonl:{path}') as opened:
            opened.add(Plant(1, 'Fern'))

            def progress(lines):
                assert opened.add(Plant(2, 'Moss', 'shade'))
                return lines

            assert verify(path, progress=progress) == Verified(1)
        path.write_bytes(SOUND[:-10])
        with ThreadPoolExecutor(1) as pool, locked(path):
            checking = pool.submit(verify, path)
            with pytest.raises(TimeoutError):
                checking.result(0.1)
            append(path, SOUND[-10:])
        assert checking.result() == Verified(2)


USAGE = [
    *('', 'hush@me memory:', 'list --hush memory:', 'count memory:', 'list -'),
    *('check hush:plants.csv', 'copy x', 'copy x y jsonl:hush', 'list x hush'),
    *('list ""', 'list jsonl:hush:/x', 'list 1:hush/x', 'list x "\nhush"', 'copy x -'),
    *('check --hush', 'copy x y --wait=hush', 'list jsonl://x'),
    *('check --repair memory:', 'check --repair postgresql://hush@host/x', 'copy'),
    *('copy x password=hush', 'list --repair x', 'list \'"jsonl:x"\''),
]


class TestUsage:
    @pytest.mark.parametrize('words', USAGE)
    def test_wrong_command_is_refused(self, path, run, words, monkeypatch):
        """A wrong command ends with 2 and a reason, repeats and makes nothing."""
        monkeypatch.chdir(path.parent)
        code, output, errors = run(*shlex.split(words))
        assert (code, output) == (2, b'')
        assert 'hush' not in ''.join(errors)
        assert 'error: ' in errors[-1]
        assert files(path) == {}


class TestOutput:
    @pytest.fixture
    def path(self, path):
        """A plant file that does not fit in a pipe and its buffers."""
        path.write_bytes(records(*(Plant(id, 'Fern') for id in range(5000))))
        return path

    def test_nothing_commands_a_terminal(self, path, run):
        """Control characters are escaped in each output, which still has the plants."""
        codes = [*range(1, 32), *range(127, 160), 0x2028, 0x202E, 0x2066]
        controls = ''.join(map(chr, codes))
        named = Plant(1, f'<{controls}>', controls)
        other = path.with_name('other\x1b\x9b\udcff.jsonl')  # a byte, not a character
        other.write_bytes(records(named) + b'?\n' + MOSS)
        missing = run('list', f'{other}-missing')[2][0]
        code, checked, _ = run('check', '--repair', other)
        assert code == 0
        code, listed, _ = run('list', other)
        assert (code, record.decode(listed.splitlines()[0])) == (0, named)
        _, copied, _ = run('copy', other, path)
        for output in listed, checked, copied, os.fsencode(missing):
            assert not {*os.fsdecode(output)} & {*controls} - {'\n'}

    def test_reader_that_stops_is_no_error(self, path):
        """The reader of the output may close it early, as head does."""
        with command('list', path) as process:
            first = process.stdout.readline()
            process.stdout.close()
            errors = process.stderr.read()
            assert process.wait(PATIENCE) == 141
        assert (first, errors) == (b'{"id":0,"name":"Fern"}\n', b'')

    @pytest.mark.parametrize('close', ['<&-', '>&-', '2>&-', '<&- >&- 2>&-'])
    def test_closed_stream(self, path, close):
        """A closed stream is no traceback, and its output is in no other stream."""
        for words, code in (f'copy {path} {path}2', 0), (f'list {path}3', 1):
            script = f'{sys.executable} -m store {words} {close}'
            done = finished(['sh', '-c', script], cwd=REPOSITORY)
            assert done.returncode == code
            printed, told = code == 0, code == 1
            assert done.stdout.startswith('copied') is (
                printed and ' >&-' not in f' {close}'
            )
            assert done.stderr.startswith('Error') is (told and '2>&-' not in close)
        assert path.with_name(f'{path.name}2').read_bytes() == path.read_bytes()

    @pytest.mark.parametrize('name', ['list', '--help'])
    def test_output_on_a_full_disk(self, path, name):
        """An output that cannot be written is an error of one line."""
        code, errors = run_into(os.open('/dev/full', os.O_WRONLY), name, path)
        assert code == 1
        assert errors.startswith('Error: ')
        assert errors.endswith(f'{os.strerror(errno.ENOSPC)}\n')


def run_into(output, *arguments):
    """Run a command with a standard output; return its exit code and errors."""
    with command(*arguments, stdout=output) as process:
        os.close(output)
        errors = process.stderr.read().decode()
        return process.wait(PATIENCE), errors
