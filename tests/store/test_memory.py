"""What the file store costs in memory: for each plant, and whatever a file holds."""

import os
import re
import subprocess
import sys

import pytest
from server import REPOSITORY, finished

from store.jsonl.record import LONGEST

FERN = b'{"id":1,"name":"Fern"}\n'
MOSS = b'{"id":2,"name":"Moss"}\n'
# Resident, of a whole process, whatever the plant file has in it.
MEMORY = 160 * 2**20
LONG_NAME = '\U0001f331' + 'a' * (LONGEST - 100) + '\\n'  # four bytes a character
MANY = b''.join(b'{"id":%d,"name":"Moss"}\n' % id for id in range(10, 400_000))

# What an end of a file may be: content, and whether a line is damaged.
CONTENTS = {
    'zeros': ([(256, b'\0')], True),
    'zeros before a plant': ([(256, b'\0'), b'\n', MOSS], True),
    'text': ([(256, b'x')], True),
    'unfinished plant': ([b'{"id":2,"name":"', (256, b'a')], True),
    'plant that is too long': ([b'{"id":2,"name":"', (7, b'a'), b'"}\n'], True),
    'white space after a plant': ([MOSS[:-1], (200, b' '), b'\n'], True),
    'damage before many plants': ([b'{"id":2,"name":null}\n', MANY], True),
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


# All that reads a whole file. A start in a thread of its own has no time limit.
READ = """
from store import StoreCorrupt, open_store
from store.__main__ import main

codes = [main(['check', sys.argv[1]]), main(['list', sys.argv[1]])]
try:
    codes += open_store(f'jsonl:{sys.argv[1]}').load() or [0]
except StoreCorrupt:
    codes.append(1)
print(codes)
"""


def run(path, program):
    """Run a program; return its output, and its memory in bytes."""
    # Not ru_maxrss, which begins with that of the process that started this one.
    end = "\nprint(open('/proc/self/status').read())"
    done = finished(
        [sys.executable, '-c', f'import sys{program}{end}', str(path)],
        cwd=REPOSITORY,
        stderr=subprocess.STDOUT,
    )
    output, _, status = done.stdout.rpartition('Name:')
    return output.rstrip(), int(re.search(r'VmHWM:\s+(\d+) kB', status)[1]) * 1024


@pytest.mark.parametrize('name', CONTENTS)
def test_memory_is_bounded_whatever_a_file_has_in_it(path, name):
    """Each command and a start read it with little memory, and tell damage."""
    parts, is_damaged = CONTENTS[name]
    write(path, parts)
    output, memory = run(path, READ)
    assert output.endswith('[1, 1, 1]' if is_damaged else '[0, 0, 0]')
    assert 'Traceback' not in output
    assert memory < MEMORY


# What it costs to know a million plants, and a child to add 20,000 to them.
OWN = """
import os, re
from store import Plant, open_store

def memory(what):
    text = open('/proc/self/smaps_rollup').read()
    return int(re.search(rf'{what}:\\s+(\\d+)', text)[1])

store = open_store(f'jsonl:{sys.argv[1]}')
before = memory('Rss')
store.load()
print((memory('Rss') - before) / 1000, flush=True)
if not os.fork():
    store.add_many([Plant(id * 7919, 'Moss') for id in range(10**6, 1_020_000)])
    print((memory('Private_Dirty') - memory('Swap')) / 1024, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='it reads /proc')
def test_memory_of_a_million_plants(path):
    """A plant costs few bytes, and a child shares those that were loaded before."""
    with path.open('wb') as file:
        file.writelines(b'{"id":%d,"name":"Fern"}\n' % id for id in range(10**6))
    output, _ = run(path, OWN)
    kilobytes_a_thousand, private = map(float, output.split())
    # Three times what is aimed at: 26 bytes a plant, and 5 MiB.
    assert kilobytes_a_thousand < 78
    assert private < 15
