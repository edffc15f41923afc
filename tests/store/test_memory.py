"""What the file store costs in memory: for each plant, and whatever a file holds."""

import re
import subprocess
import sys

import pytest
from server import REPOSITORY, finished

from store.jsonl.record import LONGEST

MIB = 2**20
FERN = b'{"id":1,"name":"Fern"}\n'
# Four bytes a character, and it has to be decoded.
LONG = '{"name":"\U0001f331%s\\n","id":2}\n' % ('a' * (LONGEST - 100))
MANY = b''.join(b'{"id":%d,"name":"Moss"}\n' % id for id in range(3, 100_000))

# What follows a plant, whether a line is damaged, and MiB of the whole process.
CONTENTS = {
    'unfinished plant': (b'{"id":2,"name":"' + b'a' * 48 * MIB, True, 64),
    'damage before many plants': (b'{"id":2,"name":null}\n' + MANY, True, 64),
    'long plant': (LONG.encode(), False, 160),
}
# All that reads a whole file; a copy opens its target as a start does.
READ = """
from store.__main__ import main

commands = ['check'], ['list'], ['copy', 'memory:']
print([main([*command, sys.argv[1]]) for command in commands])
"""
# What it costs to know many plants, and a child to add a fiftieth to them.
OWN = """
import os, re
from store import Plant, open_store

def kilobytes(what):
    text = open('/proc/self/smaps_rollup').read()
    return int(re.search(rf'{what}:\\s+(\\d+)', text)[1])

store = open_store(f'jsonl:{sys.argv[1]}')
before = kilobytes('Rss')
store.load()
print(kilobytes('Rss') - before, flush=True)
if not os.fork():
    store.add_many([Plant(id * 7919, 'Moss') for id in range(10**6, 1_010_000)])
    print(kilobytes('Private_Dirty') - kilobytes('Swap'), flush=True)
    os._exit(0)
os.wait()
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
    content, is_damaged, most = CONTENTS[name]
    path.write_bytes(FERN + content)
    output, memory = run(path, READ)
    assert output.endswith('[1, 1, 1]' if is_damaged else '[0, 0, 0]')
    assert 'Traceback' not in output
    assert memory < most * MIB


@pytest.mark.skipif(sys.platform != 'linux', reason='it reads /proc')
def test_memory_of_many_plants(path):
    """A plant costs few bytes, and a child shares those that were loaded before."""
    with path.open('wb') as file:
        file.writelines(b'{"id":%d,"name":"Fern"}\n' % id for id in range(500_000))
    output, _ = run(path, OWN)
    kilobytes, private = map(int, output.split())
    # Three times what is aimed at: 26 bytes a plant, and 4 MiB.
    assert kilobytes < 3 * 26 * 500
    assert private < 3 * 4096
