"""The command line over plant files: list, check and repair; its output."""

import contextlib
import errno
import io
import os
import re
import shlex
import sys

from contract import IDS
from disk import assert_stored, files, take_side_files
from disk import lines as records
from hypothesis import given, settings
from hypothesis import strategies as st
from server import REPOSITORY, command, finished
from waiting import PATIENCE

from store import Plant
from store.__main__ import main
from store.jsonl import record

FERN = b'{"id":1,"name":"Fern"}\n'
MOSS = b'{"id":2,"name":"Moss","tag":"shade"}\n'
# For a repair: also a repeat, a second plant with an id, zeros, and damage.
LINES = [FERN, MOSS, b'{"id":1,"name":"Reed"}\n', bytes(600) + b'\n', b'?\n']
LINES += [b'{ "name": "Fern", "id": 1, "note": "twice" }\r\n', b'{"id":3,"na\n']
LINES += [b'{"id":3,"name":"Ivy","tag":null}\n', b'{"id":3,"name":"Efeu \xe9"}\n']


def test_list_prints_records(path, run):
    """Every id has its 64 bits, a line by hand becomes ours, a long one stays one."""
    plants = [*(Plant(id, 'Efeu ☘') for id in IDS), Plant(4, '\x7f' * 2**21, 'shade')]
    path.write_bytes(records(*plants) + b'\n' + b' ' + FERN)
    assert run('list', path) == (0, records(*plants) + FERN, [])
    assert [*files(path)] == [path.name]


def test_url_may_be_a_path(path, run, monkeypatch):
    """Also of a file that is made; the default is PLANTS_STORE, or plants.jsonl."""
    monkeypatch.chdir(path.parent)
    monkeypatch.delenv('PLANTS_STORE', raising=False)
    for name in './a:b', 'memory', '1@2 3é':
        (path.parent / name).write_bytes(MOSS)
        assert run('list', f' {name}\r\n') == (0, MOSS, [])
        assert run('copy', name, f'new-{name[-1]}')[0] == 0
        assert path.with_name(f'new-{name[-1]}').read_bytes() == MOSS
    path.write_bytes(FERN)
    assert run('list') == (0, FERN, [])
    monkeypatch.setenv('PLANTS_STORE', ' jsonl: memory\t\r\n')  # as of a .env file
    assert run('list') == (0, MOSS, [])
    assert run('check', '--repair')[0] == 0


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(LINES), max_size=12),
    st.sampled_from([b'', b'{"id":', b'{"id":3,"na\0\0']),
)
def test_repair_keeps_every_plant(tmp_path_factory, lines, torn):
    """Damaged lines go to a side file; the others stay where they are."""
    path = tmp_path_factory.mktemp('repair') / 'plants.jsonl'
    everything = [*filter(None, [FERN, *lines, torn])]
    path.write_bytes(text := b''.join(everything))
    plants, expected, damaged = {}, [], []
    for line in everything:
        try:
            plant = record.decode(line)
            is_sound = plants.setdefault(plant.id, plant) == plant
        except ValueError:
            is_sound = False
        (expected if is_sound else damaged).append(line)
    assert main(['check', str(path)]) == int(bool(damaged))
    assert files(path) == {path.name: text}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(['check', '--repair', str(path)]) == 0
    numbers = re.findall(r'line (\d+) \(byte', printed.getvalue())
    assert [everything[int(number) - 1] for number in numbers] == damaged
    assert (f'{path}.damaged-1' in printed.getvalue()) == bool(damaged)
    assert take_side_files(path) == [b''.join(damaged)] * bool(damaged)
    repaired = path.read_bytes()
    assert len(repaired) == len(text)
    kept = [line for line in repaired.splitlines(keepends=True) if line.strip()]
    assert kept == expected
    assert main(['check', str(path)]) == 0
    assert_stored(path, [*plants.values()], free=[10])


USAGE = [
    *('', 'count x', 'list --hush memory:', 'check --repair=hush', 'copy x', 'list -'),
    *('check hush:x', 'list jsonl:hush:x', 'list 1:hush', 'list //hush', 'list x hush'),
    *('check --repair memory:', 'list --repair x', 'copy x password=hush', 'copy x -'),
    *('list memory:x', 'list jsonl://x', 'list \'jsonl:"x"\'', 'list postgresql:x'),
    *('list postgresql://me:pass#hush@host/x', 'list "jsonl: "', 'list mysql://hush'),
]


def test_wrong_command_is_refused(path, run, monkeypatch):
    """A wrong command ends with 2 and a reason, repeats and makes nothing."""
    monkeypatch.chdir(path.parent)
    for words in USAGE:
        code, output, (error,) = run(*shlex.split(words))
        assert (code, output) == (2, b''), words
        assert re.fullmatch('Error: (?!.*hush).+', error)
    assert files(path) == {}
    assert run('check', '--help')[0] == run('--version')[0] == 0


def test_nothing_commands_a_terminal(path, run):
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
    path.write_bytes(FERN)
    _, copied, _ = run('copy', other, path)
    for output in listed, checked, copied, os.fsencode(missing):
        assert not {*os.fsdecode(output)} & {*controls} - {'\n'}


def test_reader_that_stops_is_no_error(path):
    """The reader of the output may close it early, as head does."""
    path.write_bytes(records(*(Plant(id, 'Fern') for id in range(5000))))
    with command('list', path) as process:
        first = process.stdout.readline()
        process.stdout.close()
        assert (first, process.stderr.read()) == (b'{"id":0,"name":"Fern"}\n', b'')
        assert process.wait(PATIENCE) == 141


def test_closed_streams(path):
    """No output is in a file that has their number."""
    path.write_bytes(FERN + MOSS)
    script = f'{sys.executable} -m store copy {path} {path}2 <&- >&- 2>&-'
    assert finished(['sh', '-c', script], cwd=REPOSITORY).returncode == 0
    assert path.with_name(f'{path.name}2').read_bytes() == path.read_bytes()


def test_output_on_a_full_disk(path):
    """An output that cannot be written is an error of one line."""
    path.write_bytes(FERN)  # which a buffer holds until the end
    with open('/dev/full', 'wb') as full, command('list', path, stdout=full) as process:
        errors = process.communicate(timeout=PATIENCE)[1].decode()
    assert process.returncode == 1
    assert re.fullmatch(f'Error: .*{os.strerror(errno.ENOSPC)}\n', errors)
