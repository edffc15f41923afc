"""The command line over plant files: list, count, check and repair."""

import errno
import gzip
import os
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from disk import Fault, append, assert_raise, failing, files, fill, open_paths
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import locked
from server import REPOSITORY, command, finished
from waiting import PATIENCE

import store
from store import IdTaken, Plant, StoreUnavailable, open_store
from store.__main__ import main
from store.jsonl import record
from store.jsonl.repair import Verified, verify
from store.memory import MemoryStore

FERN = b'{"id":1,"name":"Fern"}\n'
MOSS = b'{"id":2,"name":"Moss","tag":"shade"}\n'
IVY = '{"id":3,"name":"Efeu ☘"}\n'.encode()
BY_HAND = b'{ "name": "Fern", "id": 1, "note": "twice" }\r\n'
OTHER_FERN = b'{"id":1,"name":"Reed"}\n'

# Kinds of damage before the end of a file.
DAMAGE = {
    'empty-line': b'\n',
    'not-json': b'{"id":4,"name":"Oak"\n',
    'not-utf-8': b'{"id":4,"name":"\xff"}\n',
    'zeros': bytes(600) + b'\n',
    'no-record': b'{"id":"4","name":"Oak"}\n',
    'id-taken': OTHER_FERN,
}
# Sound records, a repeat, rivals with the same id, and lines that are no records.
LINES = [FERN, MOSS, IVY, BY_HAND, OTHER_FERN, *DAMAGE.values()]


class TestList:
    def test_list_prints_records(self, path, run):
        """It prints every plant as a record, or their number, and changes nothing."""
        path.write_bytes(FERN + b' ' + MOSS + IVY)
        assert run('list', path) == (0, FERN + MOSS + IVY, [])
        assert run('count', path) == (0, b'3\n', [])
        assert run('count', 'memory:') == (0, b'0\n', [])
        assert run('copy', 'memory:', 'memory:')[0] == 0
        assert files(path) == {path.name: FERN + b' ' + MOSS + IVY}

    def test_no_name_commands_a_terminal(self, path, run):
        """Control characters are escaped in each output, which still has the plants."""
        codes = [*range(1, 32), *range(127, 160), 0x2028, 0x202E, 0x2066]
        controls = ''.join(map(chr, codes))
        named = Plant(1, f'<{controls}>', controls)
        with open_store(f'jsonl:{path}') as store:
            store.add(named)
        code, listed, _ = run('list', path)
        assert (code, record.decode(listed)) == (0, named)
        other = path.with_name('other\x1b\x9b\udcff.jsonl')  # a byte, not a character
        other.write_bytes(FERN)
        _, copied, _ = run('copy', path, other)
        other.write_bytes(FERN + b'?\n' + MOSS)
        _, checked, _ = run('check', other)
        missing = run('list', f'{other}-missing')[2][0]
        for output in listed.decode(), copied.decode(), os.fsdecode(checked), missing:
            assert not set(output.replace('\n', '')) & set(controls)

    @pytest.mark.parametrize('torn', [b'', b'{"id":4'], ids=['', 'and-torn-again'])
    def test_torn_tail_is_cut_off_while_it_reads(self, path, caplog, torn):
        """A server may cut the torn tail off and append while the file is read."""
        path.write_bytes(FERN + MOSS + b'{"id":3,"name":"Iv"}}\n')
        reading = iter(open_store(f'jsonl:{path}'))
        assert next(reading) == Plant(1, 'Fern')
        with open_store(f'jsonl:{path}') as store:
            store.add(Plant(3, 'Ivy'))
        append(path, torn)
        caplog.clear()
        assert list(reading) == [Plant(2, 'Moss', 'shade'), Plant(3, 'Ivy')]
        assert bool(caplog.records) is bool(torn)


class TestWhichStore:
    @pytest.fixture(autouse=True)
    def _in_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv('PLANTS_STORE', raising=False)

    def test_plain_path_is_a_plant_file(self, path, run):
        """A path without a scheme is a plant file, also one that is made."""
        copied = b'copied: 1, already there: 0, conflicting: 0\n'
        for number, name in enumerate(['plants.jsonl', './a:b', 'memory', '1@2 3é']):
            (path.parent / name).write_bytes(FERN)
            assert run('list', name) == (0, FERN, [])
            assert run('copy', name, f'new-{number}') == (0, copied, [])
            assert path.with_name(f'new-{number}').read_bytes() == FERN
        assert run('list', 'jsonl:a:b') == (0, FERN, [])  # since it exists

    def test_default_is_the_store_of_the_service(self, path, run, monkeypatch):
        """The default URL is the one in PLANTS_STORE, otherwise plants.jsonl."""
        path.write_bytes(FERN)
        assert run('list') == (0, FERN, [])
        path.with_name('other').write_bytes(MOSS)
        monkeypatch.setenv('PLANTS_STORE', 'jsonl:other')
        assert run('list') == (0, MOSS, [])
        assert run('count') == (0, b'1\n', [])
        assert run('check', '--repair') == (0, b'1 plants verified, no damage\n', [])
        assert run('list', 'plants.jsonl') == (0, FERN, [])
        monkeypatch.setenv('PLANTS_STORE', 'postgresql://u:hu@sh@host/plants')
        code, output, errors = run('list')
        assert (code, output) == (2, b'')
        assert 'error: postgresql: percent-encode' in errors[-1]


class TestCheck:
    @pytest.mark.parametrize('options', [[], ['--repair']], ids=['check', 'repair'])
    def test_check_of_a_sound_file(self, path, run, options):
        """It prints the number of plants in a sound file, and changes nothing."""
        for text in b'', FERN + MOSS + BY_HAND:
            path.write_bytes(text)
            before = path.stat()
            verified = b'%d plants verified, no damage\n' % text.count(b'\n')
            assert run('check', *options, path) == (0, verified, [])
            assert files(path) == {path.name: text}
            assert path.stat().st_ino == before.st_ino

    @pytest.mark.parametrize('damage', DAMAGE.values(), ids=DAMAGE)
    def test_check_names_each_damaged_line(self, path, run, damage):
        """It names each damaged line, its place and its fault, and changes nothing."""
        text = FERN + damage + MOSS + damage + b'{"id":'
        path.write_bytes(text)
        code, output, errors = run('check', path)
        *found, summary = output.decode().splitlines()
        assert (code, errors) == (1, [])
        offsets = [len(FERN), len(FERN + damage + MOSS), len(text) - len(b'{"id":')]
        for number, offset, line in zip((2, 4, 5), offsets, found, strict=True):
            assert re.match(rf'{path}: line {number} \(byte {offset}\): .', line)
        assert summary.startswith('2 plants verified, damaged: 3; --repair moves')
        assert files(path) == {path.name: text}


# Files of which no line is a plant, and which no crash of ours can have left.
FOREIGN = {
    'text': (REPOSITORY / 'README.md').read_bytes(),
    'text-without-line-feed': b'plants',
    'empty-line': b'\n',
    'log': b'2026-01-01 INFO started\n' * 3,
    'object': b'{"id":7,"title":"Fern"}',
    'lines-of-objects': b'{"id":7,"title":"Fern"}\n' * 2,
    'array': b'[' + FERN.strip() + b',' + MOSS.strip() + b']\n',
    'array-of-lines': b'[\n' + FERN.strip() + b',\n' + MOSS + b']\n',
    'sqlite': b'SQLite format 3\0\x10\0\x01\x01\0\x40\x20\x20' + bytes(4074),
    'gzip': gzip.compress(FERN + MOSS),
    'binary-with-zeros-first': bytes(512) + b'\1CD001\1' + bytes(1600),
}


@pytest.mark.parametrize('content', FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize('had_plants', [False, True], ids=['', 'had-plants'])
def test_file_of_something_else_is_refused(path, run, content, had_plants):
    """Each command and a start refuse a file without a plant, and change nothing."""
    if had_plants:
        fill(path, record.decode(FERN))
        content = content.ljust(len(FERN), b'\n')  # shorter, it would be cut short
    path.write_bytes(content)
    other = path.with_name('other.jsonl')
    other.write_bytes(MOSS)
    before = files(path)
    reason = 'it is a JSON array' if content[:1] == b'[' else 'no line of it is a plant'
    error = f'Error: {path}: it is not a file of plants: {reason}'
    for words in 'list', 'count', 'check', 'check --repair':
        assert run(*words.split(), path) == (1, b'', [error]), words
    for source, target in (path, path.with_name('new.jsonl')), (other, path):
        code, output, errors = run('copy', source, target)
        assert (code, errors) == (1, [error])
        assert output == b'copied: 0, already there: 0, conflicting: 0\n'
    with open_store(f'jsonl:{path}', create='always') as store:
        assert_raise(StoreUnavailable, store.check_opening, store.ping, match=reason)
    assert files(path) == before


def test_check_of_many_repeats_reads_little(path, monkeypatch):
    """A check does not read the whole file again for each repeated line or id."""
    lines = [b'{"id":%d,"name":"%s"}\n' % (id, b'Fern' * 20) for id in range(8000)]
    others = [line.replace(b'Fern', b'Moss') for line in lines[:100]]
    path.write_bytes(b''.join([*lines, *lines[:100], *others]))
    read = Mock(wraps=os.pread)
    monkeypatch.setattr(os, 'pread', read)
    found = verify(path)
    text = path.read_bytes()
    assert list(found.damaged) == [
        f'{path}: line {number} (byte {text.find(line)}): '
        f'an earlier line has a different plant with the id {number - 8101}'
        for number, line in enumerate(others, 8101)
    ]
    # The file once, once more for the line numbers, and some KiB for each look-up.
    look_ups = 2 * 200
    sizes = [size for (_, size, _), _ in read.call_args_list]
    assert 0 < sum(sizes) < 2 * path.stat().st_size + (look_ups + 100) * 8192


class TestRepair:
    @settings(max_examples=30)
    @given(
        lines=st.lists(st.sampled_from(LINES), max_size=12),
        torn=st.sampled_from([b'', b'{"id":', b'\0' * 5]),
    )
    def test_repair_loses_no_byte(self, tmp_path_factory, lines, torn):
        """Damaged lines go to a side file and the others stay, byte for byte."""
        directory = tmp_path_factory.mktemp('repair')
        path = directory / 'plants.jsonl'
        sound, damaged, plants = [], [], {}
        for line in [*lines, torn] if torn else lines:
            try:
                plant = record.decode(line)
            except record.DamagedRecord:
                damaged.append(line)
            else:
                first = plants.setdefault(plant.id, plant)
                (sound if first == plant else damaged).append(line)
        path.write_bytes(b''.join(lines) + torn)
        is_foreign = lines and lines[0] != DAMAGE['zeros'] and not plants
        assert main(['check', '--repair', str(path)]) == int(bool(is_foreign))
        if is_foreign:
            assert files(path) == {path.name: b''.join(lines) + torn}
            return
        assert path.read_bytes() == b''.join(sound)
        sides = [side.read_bytes() for side in directory.glob('*.damaged-*')]
        assert sides == [b''.join(damaged)] * bool(damaged)
        assert len(list(directory.iterdir())) == 1 + bool(damaged)
        assert main(['check', str(path)]) == 0
        with open_store(f'jsonl:{path}') as store:
            for plant in plants.values():
                store.add(plant)
                with pytest.raises(IdTaken):
                    store.add(plant._replace(tag='another'))

    def test_repair_reports_what_it_moved(self, path, run):
        """It names the lines and a new side file; links, mode and owner stay."""
        link = path.with_name('link')
        link.symlink_to(path)
        path.touch(0o640)
        if os.getuid() == 0:
            os.chown(path, 12345, 23456)
        before = path.stat()
        for number in 1, 2:
            path.write_bytes(FERN + b'%d\n' % number + MOSS)
            code, output, errors = run('check', '--repair', link)
            moved, summary = output.decode().splitlines()
            assert (code, errors) == (0, [])
            assert f'line 2 (byte {len(FERN)})' in moved
            moved_to = f'damaged lines were moved to {path}.damaged-{number}'
            assert summary == f'2 plants verified, repaired: 1; {moved_to}'
        after = path.stat()
        assert oct(after.st_mode) == oct(before.st_mode)
        assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
        assert link.readlink() == path
        link.unlink()
        assert files(path) == {
            path.name: FERN + MOSS,
            f'{path.name}.damaged-1': b'1\n',
            f'{path.name}.damaged-2': b'2\n',
        }

    def test_server_refuses_after_a_repair(self, path, run):
        """After a repair a server refuses until it opens the file again."""
        with open_store(f'jsonl:{path}') as store:
            store.add(Plant(1, 'Fern'))
            append(path, b'?\n' + MOSS)
            code, output, _ = run('check', '--repair', path)
            assert code == 0
            assert output.endswith(b'; reload the server if it runs\n')
            uses = store.ping, lambda: store.add(Plant(3, 'Ivy'))
            assert_raise(StoreUnavailable, *uses, match='replaced by another')
        with open_store(f'jsonl:{path}') as store:
            store.add(Plant(3, 'Ivy'))
            assert [plant.id for plant in store] == [1, 2, 3]

    def test_check_blocks_no_add(self, path):
        """A check of a file in use takes the lock for a moment, not for as long."""
        with open_store(f'jsonl:{path}') as store:
            store.add(Plant(1, 'Fern'))

            def progress(lines):
                assert store.add(Plant(2, 'Moss'))
                return lines

            assert verify(path, progress=progress) == Verified(1)
            assert verify(path) == Verified(2)

    def test_line_being_written_is_no_damage(self, path):
        """A check waits for a line that another process is writing."""
        path.write_bytes(FERN + MOSS[:10])
        with ThreadPoolExecutor(1) as pool, locked(path):
            checking = pool.submit(verify, path)
            with pytest.raises(TimeoutError):
                checking.result(0.1)
            append(path, MOSS[10:])
        assert checking.result() == Verified(2)

    def test_repair_is_durable_when_it_is_reported(self, path, run, disk):
        """A power cut after a repair does not bring the old file back."""
        path.write_bytes(FERN + b'?\n')

        def before(name, *arguments):
            if name == 'rename':
                disk.named = False

        disk.before, disk.named = before, True
        assert run('check', '--repair', path)[0] == 0
        assert path.read_bytes() == FERN
        assert disk.named

    def test_interrupt_after_the_repair_keeps_the_side_file(self, path, run, disk):
        """The damaged lines are in the side file alone then."""

        def rename(*paths):
            os.rename(*paths)
            raise KeyboardInterrupt

        path.write_bytes(FERN + b'?\n')
        disk.rename = rename
        assert run('check', '--repair', path)[0] == 130
        assert files(path) == {path.name: FERN, f'{path.name}.damaged-1': b'?\n'}

    @pytest.mark.parametrize('call', ['pwrite', 'fsync', 'rename'])
    def test_failed_repair_loses_nothing(self, path, run, disk, call):
        """A repair that fails loses nothing, and may be tried again."""
        text = FERN + b'?\n' + MOSS
        path.write_bytes(text)
        for nth in range(1, 20):
            disk.before = Fault(call, nth, failing(errno.ENOSPC))
            code, _, errors = run('check', '--repair', path)
            if not disk.before.reached:
                break
            there = files(path)
            moved = there.pop(f'{path.name}.damaged-1', None)
            if moved is None:
                assert there == {path.name: text}
            else:
                assert (there, moved) == ({path.name: FERN + MOSS}, b'?\n')
                path.with_name(f'{path.name}.damaged-1').unlink()
            assert (code, len(errors)) == (1, 1)
            assert os.strerror(errno.ENOSPC) in errors[0]
            path.write_bytes(text)
        assert code == 0
        assert 1 < nth < 20


UNKNOWN = 'error: unrecognized arguments'
NO_FILE = 'error: --repair is for a file of JSON lines'
SAME = 'error: SRC and DST are the same store'
USAGE = {
    '': 'COMMAND',
    'hush@me memory:': 'error: argument COMMAND: invalid choice',
    'list --hush memory:': UNKNOWN,
    'check hush:plants.csv': 'it is not a store: use memory:',
    'copy': 'SRC, DST',
    'copy memory: memory: jsonl:hush': UNKNOWN,
    'copy x password=hush': 'it is not a store',
    'list jsonl:hush:/x': 'jsonl: it is not a path',
    'list 1:hush/x': 'it is not a store',
    'list x hush': UNKNOWN,
    'list x "\nhush"': UNKNOWN,
    'check --repair=hush': 'argument --repair: ignored explicit argument',
    'check --=hush': 'error: ambiguous option',
    'copy x y --wait=hush': 'argument --wait: invalid int value',
    'check --repair memory:': NO_FILE,
    'check --repair postgresql://hush@host/x': NO_FILE,
    'copy hush jsonl:hush': SAME,
    'copy jsonl:hush jsonl:hush': SAME,
    'copy postgresql://hush@host/x postgresql://hush@host/x': SAME,
}


class TestUsage:
    @pytest.mark.parametrize(('words', 'message'), USAGE.items())
    def test_wrong_command_is_refused(self, run, words, message):
        """A wrong command ends with a reason, repeats nothing, and exits with 2."""
        code, output, errors = run(*shlex.split(words))
        assert (code, output) == (2, b'')
        assert 'hush' not in ''.join(errors)
        assert 'error: ' in errors[-1]
        assert message in errors[-1]
        assert errors[0].startswith('usage: python -m store')

    @pytest.mark.parametrize('command', ['list', 'check --repair'])
    @pytest.mark.parametrize('name', ['file/plants.jsonl', 'x' * 300, 'missing.jsonl'])
    def test_missing_store_is_not_made(self, tmp_path, run, command, name):
        """A store that does not exist is an error, and is not made."""
        (tmp_path / 'file').touch()
        code, output, errors = run(*command.split(), tmp_path / name)
        assert (code, output) == (1, b'')
        assert errors[-1].startswith(f'Error: {tmp_path / name}: ')
        assert [entry.name for entry in tmp_path.iterdir()] == ['file']

    @pytest.mark.parametrize('command', ['list', 'check', 'check --repair'])
    def test_no_file_is_no_plant_file(self, path, run, command, monkeypatch):
        """A named pipe is refused: no command waits for it; so is a directory."""
        monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)  # for a progress bar
        os.mkfifo(path)
        reasons = 'it is not a regular file', 'it is a directory, not a file'
        for wrong, reason in zip((path, path.parent), reasons, strict=True):
            error = f'Error: {wrong}: {reason}'
            assert run(*command.split(), wrong) == (1, b'', [error])
            assert str(wrong) not in open_paths()

    def test_examples_of_the_help_work(self, path, run, monkeypatch):
        """The examples in --help are valid commands."""
        monkeypatch.chdir(path.parent)
        path.write_bytes(FERN)
        lines = run('--help')[1].decode().splitlines()
        examples = [line for line in lines if line.startswith('  python -m store ')]
        assert len(examples) == 4
        for line in examples:
            words = line.partition('|')[0].split()[3:]
            assert run(*words)[0] == int('postgresql' in line), line

    def test_version_is_printed(self, run):
        """--version prints the version of the store."""
        version = f'plant store {store.__version__}\n'
        assert run('--version') == (0, version.encode(), [])


class TestOutput:
    @pytest.fixture
    def path(self, path):
        """A plant file that does not fit in a pipe and its buffers."""
        plants = [Plant(id, 'Fern') for id in range(5000)]
        path.write_bytes(b''.join(map(record.encode, plants)))
        return path

    def test_reader_that_stops_is_no_error(self, path):
        """The reader of the output may close it early, as head does."""
        with command('list', path) as process:
            first = process.stdout.readline()
            process.stdout.close()
            errors = process.stderr.read()
            assert process.wait(PATIENCE) == 0
        assert (first, errors) == (b'{"id":0,"name":"Fern"}\n', b'')

    def test_output_without_a_reader(self, path):
        """A closed pipe ends no copy, which lists each conflict, and no check."""
        target, damaged = path.with_name('target.jsonl'), path.with_name('damaged')
        target.write_bytes(path.read_bytes().replace(b'Fern', b'Moss'))
        append(path, b'{"id":-1,"name":"Ivy"}\n')
        damaged.write_bytes(b'?\n' * 1000 + FERN)
        for arguments in ('copy', path, target), ('check', damaged):
            reader, writer = os.pipe()
            os.close(reader)
            assert run_into(writer, *arguments) == (1, '')
        assert target.read_bytes().endswith(b'{"id":-1,"name":"Ivy"}\n')

    @pytest.mark.parametrize(
        ('command', 'errors'),
        [
            ('copy - memory: <&-', 'Error: the standard input is closed\n'),
            ('list missing 2>&-', ''),
            ('list memory: >&-', ''),
        ],
    )
    def test_closed_stream(self, command, errors):
        """A closed stream is no traceback, and no error is in the other output."""
        script = f'{sys.executable} -m store {command}'
        done = finished(['sh', '-c', script], cwd=REPOSITORY)
        assert done.stderr == errors
        assert 'Error' not in done.stdout

    @pytest.mark.parametrize('name', ['list', '--help'])
    def test_output_on_a_full_disk(self, path, name):
        """An output that cannot be written is an error of one line."""
        full = os.open('/dev/full', os.O_WRONLY)
        error = f'Error: the output: {os.strerror(errno.ENOSPC)}\n'
        assert run_into(full, name, path) == (1, error)

    @pytest.mark.parametrize('number', [errno.EPIPE, errno.ENOSPC])
    def test_error_of_a_store_is_none_of_the_output(self, run, monkeypatch, number):
        """An error of the system in a store is no error of the output."""
        lost = OSError(number, 'lost')
        monkeypatch.setattr(MemoryStore, '__iter__', Mock(side_effect=lost))
        with pytest.raises(OSError, match='lost') as caught:
            run('list', 'memory:')
        assert caught.value is lost


def run_into(output, *arguments):
    """Run a command with a standard output; return its exit code and errors."""
    with command(*arguments, stdout=output) as process:
        os.close(output)
        errors = process.stderr.read().decode()
        return process.wait(PATIENCE), errors
