"""What a neighbour on the machine, or a mistake of an operator, leaves in our files."""

import fcntl
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from disk import append, assert_raise, assert_stored, fill, index_of
from server import REPOSITORY, TOKEN, finished

from store import Plant, StoreError, StoreUnavailable, open_store
from store.jsonl.record import LONGEST
from store.jsonl.repair import Verified, verify
from web.settings import Settings

FERN = b'{"id":1,"name":"Fern"}\n'
MOSS = b'{"id":2,"name":"Moss"}\n'
# Resident, of a whole process, whatever the plant file has in it.
MEMORY = 160 * 2**20
LONG_NAME = '\U0001f331' + 'a' * (LONGEST - 100) + '\\n'  # four bytes a character

# What an end of a file may be: content, and whether a line is damaged.
CONTENTS = {
    'zeros': ([(256, b'\0')], True),
    'zeros before a plant': ([(256, b'\0'), b'\n', MOSS], True),
    'text': ([(256, b'x')], True),
    'unfinished plant': ([b'{"id":2,"name":"', (256, b'a')], True),
    'plant that is too long': ([b'{"id":2,"name":"', (7, b'a'), b'"}\n'], True),
    'white space after a plant': ([MOSS[:-1], (200, b' '), b'\n'], True),
    'long plants': (
        [f'{{"name":"{LONG_NAME}","id":{id}}}\n'.encode() for id in (2, 3)],
        False,
    ),
}


def write(path, parts):
    """Write a plant, and then bytes, or MiB of a byte; zeros take no room."""
    with path.open('wb') as file:
        file.write(FERN)
        for part in parts:
            count, data = part if isinstance(part, tuple) else (0, part)
            if data == b'\0':
                file.seek(count * 2**20, os.SEEK_CUR)
                file.truncate()
                continue
            file.writelines([data * 2**20] * count if count else [data])


# Not ru_maxrss, which begins with that of the process that started this one.
MEASURE = """
import atexit, runpy, sys
atexit.register(lambda: print(open('/proc/self/status').read()))
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""
# All that reads a whole file; a start does what check_opening does.
READ = """
import sys
from store import StoreCorrupt, open_store
from store.__main__ import main

codes = [main(['check', sys.argv[1]]), main(['list', sys.argv[1]])]
try:
    open_store(f'jsonl:{sys.argv[1]}').check_opening()
except StoreCorrupt:
    codes.append(1)
print(codes, open('/proc/self/status').read())
"""


def run(*arguments, program=MEASURE, stdin=os.devnull, **environ):
    """Run a command; return its exit code, its output, and its memory in bytes."""
    with open(stdin) as source:
        done = finished(
            [sys.executable, '-c', program, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **environ},
            stdin=source,
            stderr=subprocess.STDOUT,
        )
    output, _, status = done.stdout.rpartition('Name:')
    memory = int(re.search(r'VmHWM:\s+(\d+) kB', status)[1]) * 1024
    return done.returncode, output.rstrip(), memory


@pytest.mark.parametrize('name', CONTENTS)
def test_memory_is_bounded_whatever_a_file_has_in_it(path, name):
    """Each command and a start read it with little memory, and tell damage."""
    parts, is_damaged = CONTENTS[name]
    write(path, parts)
    code, output, memory = run(str(path), program=READ)
    assert (code, memory < MEMORY) == (0, True), memory
    assert output.endswith('[1, 1, 1]' if is_damaged else '[0, 0]')
    assert 'Traceback' not in output
    code, _, memory = run('store', 'count', '-', stdin=path)
    assert (code, memory < MEMORY) == (int(is_damaged), True), memory
    if name == 'zeros':
        environ = {'PLANTS_STORE': f'jsonl:{path}', 'PLANTS_TOKENS': TOKEN}
        code, _, memory = run('gunicorn', '--check-config', **environ)
        assert (code, memory < MEMORY) == (1, True), memory


def test_faults_are_named_up_to_a_number(path):
    """The others are counted, in little memory, and a repair moves all of them."""
    path.write_bytes(b'{"id":1}\n' * 10_000 + FERN)
    code, output, memory = run('store', 'check', str(path))
    *named, more, summary = output.splitlines()
    assert (code, memory < MEMORY) == (1, True), memory
    assert named[-1] == f'{path}: line 1000 (byte 8991): name: None is not a string'
    assert (len(named), more) == (1000, '... and 9000 more')
    assert summary.startswith('1 plants verified, damaged: 10000; --repair')
    code, output, memory = run('store', 'check', '--repair', str(path))
    assert (code, memory < MEMORY) == (0, True), memory
    assert 'repaired: 10000; ' in output
    assert path.read_bytes() == FERN
    assert path.with_name('plants.jsonl.damaged-1').stat().st_size == 9 * 10_000


def test_longest_body_is_the_longest_record(path):
    """A plant of the longest body is stored and read; a longer one is refused."""
    plant = Plant(1, 'a' * (LONGEST - len('{"id":1,"name":""}')))
    with open_store(f'jsonl:{path}') as store:
        store.add(plant)
        with pytest.raises(StoreError, match=f'id 2: .*longer than {LONGEST} byt'):
            store.add(Plant(2, plant.name + 'a'))
        assert list(store) == [plant]
    assert run('store', 'count', '-', stdin=path)[:2] == (0, '1')
    assert Settings.from_environ({'PLANTS_MAX_BODY': str(LONGEST)})


def test_check_confirms_damage_under_the_lock(path, monkeypatch):
    """A torn tail that a server mends meanwhile is no damage."""
    path.write_bytes(FERN + MOSS + b'{"id":3,"name":"Ivy\n{"id":4,"na\n')

    def progress(lines):
        for line in lines:
            if line.offset == len(FERN + MOSS):
                fill(path, *(Plant(id, f'Ivy {id}') for id in range(3, 100)))
            yield line

    assert verify(path, progress=progress) == Verified(2)
    assert verify(path) == Verified(99)
    append(path, b'{"id":\n')
    assert len(verify(path).damaged) == 1


# What a neighbour may put there; a FIFO would block whoever opens it.
PUT = {
    'a symbolic link': Path.symlink_to,
    'a second name': Path.hardlink_to,
    'a FIFO': lambda place, target: os.mkfifo(place),
}


@pytest.mark.parametrize('suffix', ['', '-lock', '-new', '-wal', '-shm', '-journal'])
@pytest.mark.parametrize('put', PUT.values(), ids=PUT)
def test_what_is_not_ours_is_refused_and_stays(path, put, suffix):
    """A link beside the plant file is not followed, or removed; a sentence names it."""
    path.write_bytes(FERN)
    fill(path, Plant(2, 'Moss'))
    target = path.with_name('of somebody else')
    target.write_bytes(b'precious')
    target.chmod(0o600)
    if suffix == '-new':  # opened when an index is built
        index_of(path).unlink()
    place = index_of(path, suffix)
    place.unlink(missing_ok=True)
    put(place, target)
    # Without a path: a client sees what follows the name of the store.
    reason = rf'^{path}: \.index{suffix} beside the plant file is not a regular file '
    reason += 'with one link'
    with open_store(f'jsonl:{path}') as store:
        adds = [lambda: store.add(Plant(3, 'Ivy'))] * (suffix != '-lock')
        assert_raise(StoreUnavailable, store.ping, *adds, match=f'{reason}: remove')
    assert target.read_bytes() == b'precious'
    assert target.stat().st_mode & 0o777 == 0o600
    assert place.lstat().st_ino
    place.unlink()
    fill(path, Plant(4, 'Oak'))


def test_link_to_the_lock_is_refused_while_a_server_runs(path, monkeypatch):
    """A probe would empty the file that a neighbour has linked to after a check."""
    target = path.with_name('of somebody else')
    target.write_bytes(b'precious')
    lock = path.with_name('plants.jsonl.index-lock')
    with open_store(f'jsonl:{path}') as store:
        store.add(Plant(1, 'Fern'))
        lock.unlink(missing_ok=True)
        lock.symlink_to(target)
        monkeypatch.setattr('store.jsonl.disk.check_made_by_us', lambda _: None)
        with pytest.raises(StoreUnavailable, match='symbolic link') as caught:
            store.ping()
        assert str(path.parent) not in caught.value.reason  # a client sees it
        monkeypatch.undo()
        store.add(Plant(2, 'Moss'))
    assert target.read_bytes() == b'precious'


@pytest.mark.skipif(not hasattr(fcntl, 'F_SETLEASE'), reason='Linux has leases')
def test_lease_on_the_lock_delays_no_probe(path, monkeypatch):
    """An open would wait 45 s for a process that has a lease on the file."""
    monkeypatch.setattr('store.jsonl.file.FLUSH_WITHIN', 100)  # it opens the file, too
    handler = signal.signal(signal.SIGIO, signal.SIG_IGN)  # it tells of the open
    with open_store(f'jsonl:{path}') as store:
        store.add(Plant(1, 'Fern'))
        with path.with_name('plants.jsonl.index-lock').open('r+b') as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            with pytest.raises(StoreUnavailable, match='temporarily unavailable'):
                store.ping()
        store.ping()
    signal.signal(signal.SIGIO, handler)


def test_side_files_are_new_files(path):
    """A link with the name of the next side file is left, and not written through."""
    path.write_bytes(FERN + b'{"id":')
    target = path.with_name('of somebody else')
    path.with_name('plants.jsonl.torn-1').symlink_to(target)
    fill(path, Plant(2, 'Moss'))
    assert path.with_name('plants.jsonl.torn-2').read_bytes() == b'{"id":'
    assert not target.exists()


def test_start_waits_for_no_file(tmp_path):
    """A FIFO in the place of a configured file is refused at once, with a sentence."""
    file = tmp_path / 'file'
    os.mkfifo(file)
    environ = {'PLANTS_STORE': 'memory:', 'PLANTS_TOKENS_FILE': str(file)}
    options = ['-w1', '--certfile', str(file), '--pid', str(file)]
    code, output, _ = run('gunicorn', '--check-config', *options, **environ)
    assert code == 1
    for name in file, 'certfile, keyfile', 'pidfile':
        assert f'{name}: it is not a regular file' in output


ENDLESS = 'WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)'
STRANGE = {
    'endless view': f'DROP TABLE plants; CREATE VIEW plants AS {ENDLESS} '
    'SELECT i AS id, i AS offset FROM n',
    'endless state': f'ALTER TABLE state RENAME TO other; CREATE VIEW state AS '
    f'SELECT other.* FROM other, ({ENDLESS} SELECT i FROM n)',
    'trigger': 'CREATE TRIGGER t AFTER INSERT ON plants BEGIN '
    'DELETE FROM plants WHERE id = new.id; END',
    'many rows': f'INSERT INTO state SELECT state.* FROM state, ({ENDLESS} '
    'SELECT i FROM n LIMIT 100000)',
    'long value': 'UPDATE state SET tail = zeroblob(100000000)',
    'other table': 'CREATE TABLE other (a)',
    'many tables': f'PRAGMA writable_schema = ON; INSERT INTO sqlite_master {ENDLESS} '
    "SELECT 'table', 't' || i, 't' || i, 2, 'CREATE TABLE t' || i || ' (a)' FROM n "
    'LIMIT 200000',
}


@pytest.mark.parametrize('name', STRANGE)
def test_index_that_is_not_one_is_built_again(path, name):
    """A start and check ask no index with other tables, rows or values than ours."""
    fill(path, Plant(1, 'Fern'))
    index = index_of(path)
    with closing(sqlite3.connect(index)) as connection:
        connection.executescript(f'BEGIN; {STRANGE[name]}; COMMIT')
    code, output, memory = run('store', 'check', str(path))
    assert (code, output) == (0, '1 plants verified, no damage')
    assert memory < MEMORY
    assert_stored(path, [Plant(1, 'Fern')], free=[2])
    with closing(sqlite3.connect(index)) as connection:
        assert connection.execute('SELECT id FROM plants').fetchall() == [(1,), (2,)]
