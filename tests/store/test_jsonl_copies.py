"""Copies of the files of a store, taken one after another and put back in any mixture.

A backup tool copies file by file while the service runs, and ``cp`` puts copies back in
place: the plant file keeps its inode. So the main file of the index may be of another
moment than its ``-wal``, and both of other moments than the plant file.
"""

import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from random import Random

import pytest
from disk import assert_stored, fill, lines, raw_plants
from waiting import FORK, wait_until

from store import IdTaken, Plant, StoreUnavailable
from store.jsonl import JSONLinesStore, file, table

pytestmark = pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')

SEED = 29
STEP = 20  # plants; with scattered ids they change most pages of the table
MAIN, WAL = '.index', {'.index-wal', '.index-shm'}


def scattered(count, chance):
    """Return plants with random ids."""
    return [Plant(chance.getrandbits(62), 'Fern') for _ in range(count)]


_opened = []  # the store of a writer, in its process


def writer(path):
    """Return a process that has the store open."""
    return ProcessPoolExecutor(1, FORK, lambda: _opened.append(JSONLinesStore(path)))


def _add(plants, flush):
    assert _opened[0].add_many(plants) == [True] * len(plants)
    if flush:
        wait_until(_opened[0]._backend()._index.flush)


def _add_for_ever(chance):
    while True:
        _add(scattered(STEP, chance), flush=True)


def _close():
    _opened[0].close()


def kill(writer):
    """Kill a process, as the system would without memory."""
    os.kill(writer.submit(os.getpid).result(), signal.SIGKILL)
    writer.shutdown()


@pytest.fixture(scope='module')
def load(tmp_path_factory):
    """Return the path of a plant file, and copies of all files at moments of a load."""
    # Each copy maps what follows the name of the plant file to the content.
    path = tmp_path_factory.mktemp('load') / 'plants.jsonl'
    chance = Random(SEED)
    moments = []

    def copy():
        found = path.parent.glob(f'{path.name}*')
        moments.append({f.name.removeprefix(path.name): f.read_bytes() for f in found})

    def add(writer, count, flush=True):
        writer.submit(_add, scattered(count, chance), flush).result()
        copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, 'FLUSH_WITHIN', 1e6)  # no flush but those of the load
        patch.setattr(table, 'CHECKPOINT_PAGES', 30)  # those of two or three flushes
        for bulk in 2000, 500:
            one, other = writer(path), writer(path)
            for process, count in zip(
                [one, other] * 3, [bulk] + [STEP] * 5, strict=True
            ):
                add(process, count)
            add(one, STEP, flush=False)
            if bulk == 2000:  # the second load is killed
                one.submit(_close).result()
                other.submit(_close).result()
                copy()
            kill(one)
            kill(other)
    assert len({moment[MAIN] for moment in moments}) >= 5  # there were checkpoints
    return path, moments


def put_back(path, main, wal, plants):
    """Put back a plant file, the -wal of one moment, and all other files of another."""
    for found in path.parent.glob(f'{path.name}?*'):
        found.unlink()
    content = {name: main[name] for name in main.keys() - WAL}
    content |= {name: wal[name] for name in wal.keys() & WAL}
    for suffix, data in (content | {'': plants}).items():
        path.with_name(path.name + suffix).write_bytes(data)


def taken_at(moments):
    """Return some plants of each step up to the last of these moments."""
    ends = [0, *(len(moment['']) for moment in moments)]
    steps = [raw_plants(moments[-1][''][start:end]) for start, end in pairwise(ends)]
    return [plant for step in steps for plant in step[:STEP]]


def assert_taken(store, plants):
    """Check that the ids of these plants are taken, and another one is free."""
    others = [plant._replace(name='Other') for plant in plants]
    *outcomes, free = store.add_many([*others, Plant(-1, 'Free')])
    assert all(isinstance(outcome, IdTaken) for outcome in outcomes)
    assert free is True


@pytest.mark.parametrize('age', ['older', 'last', 'newer'])
def test_files_of_two_moments_free_no_id(load, age):
    """Whatever copies of both are put back beside a plant file, no id is free twice."""
    path, moments = load
    newest = len(moments) // 2 if age == 'older' else len(moments) - 1
    plants = moments[newest]['']
    taken = taken_at(moments[: newest + 1])
    if age == 'newer':
        more = [Plant(number, 'Moss') for number in range(STEP)]
        plants, taken = plants + lines(*more), taken + more
    mixtures = {
        (main[MAIN], wal.get('.index-wal')): (of_main, of_wal)
        for of_main, main in enumerate(moments)
        for of_wal, wal in enumerate([{}, *moments], -1)
    }
    chosen = Random(SEED).sample([*mixtures.values()], 40 if age == 'last' else 20)
    for of_main, of_wal in chosen:
        print(f'seed {SEED}: the main file of moment {of_main}, the -wal of {of_wal}')
        put_back(path, moments[of_main], {} if of_wal < 0 else moments[of_wal], plants)
        with JSONLinesStore(path) as store:
            reason = ''
            try:
                assert_taken(store, taken)
            except StoreUnavailable as ex:
                reason = ex.reason
        if reason:
            assert reason.startswith('the file was cut short')
            assert newest < max(of_main, of_wal)


def test_copy_of_half_a_checkpoint_frees_no_id(load):
    """A tool reads pages before and after a checkpoint, and then the -wal, if any."""
    path, moments = load
    taken = taken_at(moments)
    for number, (before, after) in enumerate(pairwise(moments), 1):
        if before[MAIN] == after[MAIN]:
            continue
        for wal in moments[number + 1 : number + 3]:
            for cut in range(3 * 4096, len(before[MAIN]), 4 * 4096):
                print(f'seed {SEED}: {cut} bytes from before moment {number}')
                main = before[MAIN][:cut] + after[MAIN][cut:]
                put_back(path, after | {MAIN: main}, wal, moments[-1][''])
                with JSONLinesStore(path) as store:
                    assert_taken(store, taken)


def test_checkpoint_cut_off_by_a_kill_needs_no_new_index(path, rebuilt, monkeypatch):
    """The files that a killed process leaves belong together: no index is built."""
    monkeypatch.setattr(file, 'FLUSH_WITHIN', 1e6)
    monkeypatch.setattr(table, 'CHECKPOINT_PAGES', 1)
    chance = Random(SEED)
    fill(path, *scattered(2000, chance))
    for number in range(10):
        size = path.stat().st_size
        process = writer(path)
        pid = process.submit(os.getpid).result()
        process.submit(_add_for_ever, Random(number))
        wait_until(lambda size=size: path.stat().st_size > size)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        process.shutdown()
        with JSONLinesStore(path) as store:
            store.ping()
            assert_stored(store, raw_plants(path.read_bytes())[-100:])
        assert not rebuilt()
