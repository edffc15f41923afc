"""Copies between every pair of stores, with a real database; progress."""

import os
import pty
import re
import signal
import sys
import termios
from contextlib import suppress

import pytest
from disk import lines
from server import command
from waiting import PATIENCE, wait_until

from store import Plant, open_store

FERN, MOSS, IVY = Plant(1, 'Fern'), Plant(2, 'Moss', 'shade'), Plant(3, 'Efeu ☘', '')
REED = Plant(1, 'Reed')
MANY = [Plant(id, 'Fern', 'shade') for id in range(2, 3002)]


@pytest.fixture
def make(tmp_path, database):
    """Return a function that makes a store of a kind, and returns its URL."""
    numbers = iter(range(100))

    def make(kind, *plants):
        file = f'jsonl:{tmp_path}/{next(numbers)}.jsonl'
        url = database.new_url() if kind == 'postgresql' else file
        with open_store(url) as store:
            store.ping()
            store.add_many(plants)
        return url

    return make


def plants_in(url):
    """Return the plants of a store, in the order of their ids."""
    with open_store(url, create=False) as store:
        return sorted(store)


def counts(output):
    """Return the counts of a copy: copied, already there, conflicting."""
    pattern = r'copied: (\d+), already there: (\d+), conflicting: (\d+)\n$'
    return tuple(map(int, re.search(pattern, output.decode()).groups()))


@pytest.mark.parametrize('source', ['jsonl', 'postgresql'])
def test_copy_counts_plants(make, run, monkeypatch, source):
    """The target gets the plants that it lacks, and keeps its own in conflicts."""
    monkeypatch.setitem(sys.modules, 'tqdm', None)  # it may be missing
    [target] = {'jsonl', 'postgresql'} - {source}
    source, target = make(source, REED, MOSS, IVY), make(target, FERN, MOSS)
    for copied in 1, 0:  # nothing the second time
        code, output, _ = run('copy', source, target)
        assert (code, counts(output)) == (1, (copied, 2 - copied, 1))
        assert b'{"id":1,"name":"Reed"}\n' in output
        assert plants_in(target) == [FERN, MOSS, IVY]
    assert plants_in(source) == [REED, MOSS, IVY]


def test_only_a_target_is_made(path, url, run):
    """Also when there is nothing to copy; but not for a missing or wrong source."""
    target = path.with_name('target.jsonl')
    readers = ('list', path), ('check', path), ('list', url)
    for words in *readers, ('copy', path, url), ('copy', url, target):
        code, output, errors = run(*words)
        assert (code, output) == (1, b'')
        assert errors[-1].startswith('Error: ')
    assert run('copy', path, 'shrubs:x')[0] == 2
    assert not [*path.parent.iterdir()]
    for made in f'jsonl:{path}', url:
        assert run('copy', 'memory:', made)[0] == 0
        assert plants_in(made) == []


def test_copy_that_is_interrupted_may_be_repeated(path, make, run):
    """A single Ctrl-C ends it, with its counts; what was copied stays."""
    source = make('jsonl', *MANY)
    path.write_bytes(lines(*(plant._replace(name='Reed') for plant in MANY[500:])))
    before = path.stat().st_size
    with command('copy', source, path) as process:
        # It cannot end: the conflicts do not fit in the pipe.
        wait_until(lambda: path.stat().st_size > before)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (130, b'')
    assert counts(output)[0] <= 500  # it may not have counted what it has stored
    assert counts(run('copy', source, path)[1]) == (0, 500, len(MANY) - 500)


def test_damaged_source_ends_the_copy(path, make, run):
    """A damaged line ends the copy with its place; what was copied stays."""
    target, sound = make('jsonl'), lines(*MANY[:1500])
    path.write_bytes(sound + b'{"id":"1"}\n' + lines(FERN))
    code, output, (error,) = run('copy', path, target)
    assert (code, counts(output)) == (1, (1000, 0, 0))
    assert f'line 1501 (byte {len(sound)})' in error
    assert run('check', '--repair', path)[0] == 0
    # A copy to the same file by another name finds all plants already there.
    other = path.with_name('other.jsonl')
    other.hardlink_to(path)
    for to, copied in (target, 501), (path, 0), (other, 0):
        code, output, _ = run('copy', path, to)
        assert (code, counts(output)) == (0, (copied, 1501 - copied, 0))
    assert plants_in(target) == plants_in(f'jsonl:{path}') == [FERN, *MANY[:1500]]


def test_refused_plants_do_not_end_the_copy(make, database, run):
    """Each is named with its reason; a repeat finds the others already there."""
    source, target = make('jsonl', FERN, *MANY), make('postgresql')
    rule = "ALTER TABLE plants ADD CHECK (id % 1250 <> 0 AND name <> 'Moss')"
    database.execute(rule, url=target)
    for known in 1998, 2999:  # of a batch with a refused plant the others are there
        code, output, _ = run('copy', source, target)
        found = f'copied: {2999 - known}, already there: {known}, conflicting: 0'
        assert (code, output.splitlines()[-1]) == (1, f'{found}, refused: 2'.encode())
        assert re.findall(rb'refused: {"id":(\d+),', output) == [b'1250', b'2500']
    database.execute('ALTER TABLE plants RENAME name TO away', url=target)
    code, output, _ = run('copy', source, target)
    assert (code, b'refused' in output) == (1, False)


def test_progress_bar_on_a_terminal(make):
    """It does not mix with the other output."""
    source, target = make('jsonl', REED, *MANY), make('jsonl', FERN)
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    shown, both = b'', {'stdout': terminal, 'stderr': terminal}
    with command('check', '--repair', source, **both) as process:
        process.wait(PATIENCE)  # without a bar: a stopped terminal would keep the lock
    with command('copy', source, target, **both) as process:
        os.close(terminal)
        with suppress(OSError):  # read() fails at the end of a terminal
            while data := os.read(master, 4096):
                shown += data
        assert process.wait(PATIENCE) == 1
    os.close(master)
    bars = [re.search(rb'\d+ plants \[', it) for it in shown.split(b'verified')]
    assert [*map(bool, bars)] == [False, True]
    printed = re.split(rb'[\r\n]+', shown)
    assert b'conflicting: {"id":1,"name":"Reed"}' in printed  # a line of its own
    assert counts(b'\n'.join(printed)) == (3000, 0, 1)
