"""The file store in forked processes: nothing that was opened before is used after."""

import logging
import os
import sqlite3
import threading
from functools import partial

import pytest
from disk import Disk, Gate, append, assert_stored, fill, installed, lines, open_paths
from waiting import PATIENCE, in_child, in_threads

from store import Plant
from store.jsonl import JSONLinesStore, file, table

pytestmark = pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')

PLANTS = [Plant(number, 'Fern') for number in range(1, 5)]


def test_child_closes_inherited_descriptors(path):
    """A child that opens a store closes its copies of the parent's descriptors."""

    def opened():
        # SQLite itself may keep one of the table for its next connection.
        ours = (name for name in open_paths() if name.startswith(str(path)))
        return sorted(name for name in ours if not name.endswith('.index'))

    with JSONLinesStore(path) as store, JSONLinesStore(f'{path.parent}/2') as unused:
        unused.ping()
        store.add(PLANTS[0])
        before = opened()

        def look():
            store.ping()
            assert opened() == before
            assert {pid for pid, _ in table._readers.values()} == {os.getpid()}

        in_child(look)
        assert_stored(store, PLANTS[:1])


def test_killed_parent_leaves_no_lock(path):
    """A parent that is killed in the lock leaves none to a child that does nothing."""
    JSONLinesStore(path, create='always').close()
    reader, writer = os.pipe()

    def fork_and_die(name, *arguments):
        if name == 'pwrite' and lines(PLANTS[0]) in arguments:
            if not os.fork():
                os.close(writer)
                os.read(reader, 1)  # until the test has ended
            os._exit(0)

    if not (parent := os.fork()):
        with installed(Disk(path)) as disk:
            disk.before = fork_and_die
            JSONLinesStore(path).add(PLANTS[0])
        os._exit(1)
    os.close(reader)
    with open(writer):
        assert os.waitpid(parent, 0)[1] == 0
        with JSONLinesStore(path) as store:
            assert store.add(PLANTS[1])


def test_fork_while_threads_add_and_flush(path, monkeypatch):
    """A child of a parent whose threads add, flush and log can use the store."""
    monkeypatch.setattr(file, 'FLUSH_WITHIN', 0.001)
    done = threading.Event()
    with JSONLinesStore(path) as store:

        def work(first):
            number = first
            while not done.is_set():
                store.add(Plant(number, 'Fern'))
                number += 1

        def fork():
            try:
                for number in range(25):
                    in_child(lambda number=number: store.add(Plant(number, 'Moss')))
            finally:
                done.set()

        in_threads(fork, lambda: work(10**6), lambda: work(10**7))
        assert_stored(store, [Plant(number, 'Moss') for number in range(25)])


def test_child_leaves_a_table_that_its_parent_builds(path, monkeypatch):
    """A child leaves the table alone that its parent is building."""
    insert = table.insert

    def fork(*arguments):
        monkeypatch.undo()
        in_child(store._process)
        insert(*arguments)

    with JSONLinesStore(path) as store:
        store.add_many(PLANTS)
        for part in path.parent.glob('*.index*'):
            part.unlink()
        monkeypatch.setattr(table, 'insert', fork)
        assert_stored(store, PLANTS)


def test_log_that_blocks_holds_no_lock(path):
    """While a log blocks in a thread of the parent, parent and child can add plants."""
    gate, handler = Gate(), logging.Handler()
    handler.emit = gate

    def add():
        gate.wait_for()
        in_child(lambda: store.add(PLANTS[2]))
        fill(path, PLANTS[3])
        gate.open()

    with JSONLinesStore(path) as store:
        store.add(PLANTS[0])
        append(path, b'torn')
        logging.getLogger('store').addHandler(handler)
        try:
            in_threads(lambda: store.add(PLANTS[1]), add)
        finally:
            logging.getLogger('store').removeHandler(handler)
        assert_stored(store, PLANTS[:4])


@pytest.mark.parametrize('use', ['reads', 'writes'])
def test_fork_waits_for_a_thread_in_sqlite(path, monkeypatch, use):
    """A child inherits no lock of SQLite that a thread of the parent holds."""
    inside, forked = threading.Event(), threading.Event()
    statement = 'SELECT' if use == 'reads' else 'INSERT'

    class Slow(sqlite3.Connection):
        def execute(self, sql, *parameters):
            if sql.startswith(statement) and not inside.is_set():
                inside.set()
                # A fork that did not wait would end long before this timeout.
                assert not forked.wait(0.2)
            return super().execute(sql, *parameters)

    with JSONLinesStore(path) as store:
        monkeypatch.setattr(sqlite3, 'connect', partial(sqlite3.connect, factory=Slow))

        def fork():
            assert inside.wait(PATIENCE)
            in_child(lambda: store.add(PLANTS[1]))
            forked.set()

        in_threads(lambda: store.add(PLANTS[0]), fork)
        assert_stored(store, PLANTS[:2])
