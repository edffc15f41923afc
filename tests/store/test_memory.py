"""What the file store costs in memory: for each plant, and whatever a file holds."""

import subprocess
import sys

import pytest
from exchange import table
from server import REPOSITORY, finished

from store.jsonl.record import LONGEST

MIB = 1024  # KiB
FERN = b'{"id":1,"name":"Fern"}\n'
# Four bytes a character, and it has to be decoded.
LONG = '{"name":"\U0001f331%s\\n","id":2}\n' % ('a' * (LONGEST - 100))
MANY = b''.join(b'{"id":%d,"name":"Moss"}\n' % id for id in range(3, 60_000))

# What follows a plant, the exit codes, and MiB of the whole process.
CONTENTS = {
    'unfinished plant': (b'{"id":2,"name":"' + b'a' * 2**20 * 32, [1, 1, 1], 56),
    'damage before many plants': (b'{"id":2,"name":null}\n' + MANY, [1, 1, 1], 44),
    'long plant': (LONG.encode(), [0, 0, 0], 160),
}
# All that reads a whole file; a copy opens its target as a start does.
READ = """
commands = ['check'], ['list'], ['copy', 'memory:']
print([main([*command, path]) for command in commands])
"""
# What it costs to know many plants, and a child to add a fiftieth to them.
OWN = """
store = open_store(f'jsonl:{path}')
before = kib('Rss')
store.load()
print(kib('Rss') - before, flush=True)
if not os.fork():
    store.add_many([Plant(id * 7919, 'Moss') for id in range(10**6, 1_010_000)])
    print(kib('Private_Dirty') - kib('Swap'), flush=True)
    os._exit(0)
os.wait()
"""
# Not ru_maxrss, which begins with that of the process that started this one.
PROGRAM = """
import os, re, sys
from store import Plant, open_store
from store.__main__ import main

def kib(figure, file='smaps_rollup'):
    text = open(f'/proc/self/{file}').read()
    return int(re.search(rf'{figure}:\\s+(\\d+) kB', text)[1])

path = sys.argv[1]
%s
print(kib('VmHWM', 'status'))
"""


def run(path, program):
    """Run a program; return the lines of its output, the last one its memory in KiB."""
    command = [sys.executable, '-c', PROGRAM % program, str(path)]
    done = finished(command, cwd=REPOSITORY, stderr=subprocess.STDOUT)
    return done.stdout.splitlines()


@table('content, codes, most', CONTENTS)
def test_memory_is_bounded_whatever_a_file_has_in_it(path, content, codes, most):
    """Each command and a start read it with little memory, and tell damage."""
    path.write_bytes(FERN + content)
    *output, last, memory = run(path, READ)
    assert last == str(codes)
    assert 'Traceback' not in str(output)
    assert int(memory) < most * MIB


@pytest.mark.skipif(sys.platform != 'linux', reason='it reads /proc')
def test_memory_of_many_plants(path):
    """A plant costs few bytes, and a child shares those that were loaded before."""
    with path.open('wb') as file:
        file.writelines(b'{"id":%d,"name":"Fern"}\n' % id for id in range(250_000))
    known, private, _ = map(int, run(path, OWN))
    # Three times what is aimed at: 26 bytes a plant, and 4 MiB.
    assert known < 3 * 26 * 250
    assert private < 3 * 4 * MIB
