"""The file store on a disk that fails, and that loses unsynced writes."""

import contextlib
import errno
import itertools
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from disk import (
    Disk,
    Fault,
    append,
    assert_raise,
    blocked_syncs,
    failing,
    failure,
    fill,
    index_of,
    installed,
    lines,
    open_paths,
    path_of,
    raw_plants,
    take_side_files,
    try_add,
)
from waiting import PATIENCE, wait_until

from store import IdTaken, Plant, StoreUnavailable, group_commit
from store.jsonl import JSONLinesStore

FERN, MOSS, IVY, REED = (
    Plant(number, name, 'shade' if number % 2 else None)
    for number, name in enumerate(('Fern', 'Moss', 'Ivy', 'Reed'), 1)
)
TORN = b'{"id":7,"na'


@pytest.fixture
def pool():
    """Return an executor of threads."""
    with ThreadPoolExecutor(32) as pool:
        yield pool


def add_each(pool, gate, store, *plants):
    """Add plants, each in its own thread and with its own blocked sync."""
    adds = []
    for plant in plants:
        adds.append(pool.submit(store.add, plant))
        gate.wait_for(len(adds))
    return adds


CALLS = ['open', 'pwrite', 'fdatasync', 'fsync', 'ftruncate', 'rename', 'unlink']
# The store does not tell errors apart.
EFFECTS = {call: (call, failing(errno.EIO)) for call in CALLS}
EFFECTS['pwrite-short'] = 'pwrite', lambda fd, data, offset: max(1, len(data) // 2)


def no_file(disk):
    """Start without a plant file. Like the others, return the acknowledged plants."""
    return set()


def unsynced_line(disk, torn=b'', with_index=False):
    """Start with the file of a process that was killed before its sync."""
    fill(disk.plants, FERN)
    if not with_index:
        index_of(disk.plants).unlink()
    fd = disk.open(disk.plants, os.O_WRONLY)
    disk.pwrite(fd, lines(MOSS) + torn, disk.plants.stat().st_size)
    os.close(fd)
    return {FERN}


def torn_line(disk):
    """Start as after a kill in a write; the index has the first line."""
    return unsynced_line(disk, TORN, with_index=True)


class TestEveryCall:
    @pytest.mark.parametrize('lasting', [False, True], ids=['once', 'lasting'])
    @pytest.mark.parametrize(('call', 'effect'), EFFECTS.values(), ids=EFFECTS)
    @pytest.mark.parametrize('prepare', [no_file, unsynced_line, torn_line])
    def test_failing_call_loses_nothing(self, tmp_path, prepare, call, effect, lasting):
        """Whichever call fails, acknowledged plants stay and the file is sound."""
        plants = [FERN, MOSS, IVY, REED]
        for nth in itertools.count(1):
            disk = Disk(tmp_path / str(nth) / 'plants.jsonl')
            disk.plants.parent.mkdir()
            with installed(disk):
                acknowledged = prepare(disk)
                disk.before = fault = Fault(call, nth, effect, lasting)
                for _ in range(2):
                    with JSONLinesStore(disk.plants) as store:
                        tries = 1 if lasting else 2
                        added = (one for one in plants if try_add(store, one, tries))
                        acknowledged.update(added)
                disk.resume()
                self.check(disk, acknowledged, set(plants))
            if not fault.reached:
                break
        assert acknowledged == set(plants)

    def check(self, disk, acknowledged, offered):
        """Check the file as it is, and some contents that a power cut could leave."""
        path = disk.plants
        assert disk.named or not acknowledged
        contents = {
            disk.image(),
            disk.image(disk.unsynced() // 2),
            disk.image(zeroed=True),
            path.read_bytes() if path.exists() else b'',
        }
        index = {file: file.read_bytes() for file in path.parent.glob('*.index*')}
        for content in contents:
            for file in path.parent.glob('*.index*'):
                file.unlink()
            for file, data in index.items():
                file.write_bytes(data)
            disk.restart(content)
            fill(path)
            stored = raw_plants(path.read_bytes())
            assert acknowledged <= set(stored) <= offered
            assert len(stored) == len(set(stored))


class TestFullDisk:
    @pytest.fixture
    def store(self, path, disk):
        """Return an open store with one plant."""
        with JSONLinesStore(path) as store:
            store.add(FERN)
            yield store

    @pytest.mark.parametrize('written', [0, 5])
    def test_failed_write_leaves_no_byte(self, path, disk, store, written):
        """A failed write is rolled back; the store is not ready until writes work."""

        def effect(fd, data, offset):
            if offset > len(lines(FERN)) or not written:
                raise failure(errno.EDQUOT)
            return written

        disk.before = Fault('pwrite', 1, effect, lasting=True)
        for use in (lambda: store.add(MOSS)), (lambda: store.add(IVY)), store.ping:
            with pytest.raises(StoreUnavailable) as caught:
                use()
            assert caught.value.reason == os.strerror(errno.EDQUOT)
            assert path.read_bytes() == lines(FERN)
        assert index_of(path, '-lock').read_bytes() == b''
        store.add(FERN)
        with pytest.raises(IdTaken):
            store.add(FERN._replace(name='Moss'))
        disk.resume()
        store.ping()
        assert path.read_bytes() == lines(FERN)
        store.add(MOSS)
        assert path.read_bytes() == disk.durable == lines(FERN, MOSS)
        disk.calls.clear()
        store.ping()  # which is as short again as at first
        assert [call[2:] for call in disk.calls if 'pwrite' in call] == [(b'\0', 0)]

    def test_write_of_zero_bytes_is_an_error(self, path, disk, store):
        disk.before = Fault('pwrite', 1, lambda *arguments: 0, lasting=True)
        add = partial(store.add, MOSS)
        assert_raise(StoreUnavailable, add, match='nothing could be written')
        assert path.read_bytes() == lines(FERN)

    def test_failed_rollback_is_made_up_for(self, path, disk, store):
        """A partial line that cannot be rolled back is cut off once that works."""
        limits = iter([5])

        def before(name, *arguments):
            if name in ('pwrite', 'ftruncate'):
                for limit in limits:
                    return limit
                raise failure(errno.EIO if name == 'pwrite' else errno.EROFS)
            return None

        disk.before = before
        adds = (partial(store.add, plant) for plant in (MOSS, MOSS, IVY, FERN))
        assert_raise(StoreUnavailable, *adds, match=os.strerror(errno.EIO))
        assert path.read_bytes() == lines(FERN) + lines(MOSS)[:5]
        disk.resume()
        store.add(IVY)
        assert disk.durable == lines(FERN, IVY)
        assert take_side_files(path) == [lines(MOSS)[:5]]

    @pytest.mark.parametrize('call', ['fsync', 'ftruncate'])
    def test_failed_cut_makes_one_side_file(self, path, disk, store, call):
        append(path, TORN)
        disk.before = Fault(call, 1, failing(errno.ENOSPC), lasting=True)
        assert_raise(StoreUnavailable, *[partial(store.add, MOSS)] * 5)
        assert path.read_bytes() == lines(FERN) + TORN
        assert len(take_side_files(path)) <= 1
        disk.resume()
        store.add(MOSS)
        assert TORN in take_side_files(path)

    def test_cut_is_told_though_the_next_write_fails(self, path, disk, store, caplog):
        """The log names a side file at once, not when the disk has room again."""
        append(path, TORN)
        disk.before = Fault('pwrite', 2, failing(errno.ENOSPC))  # the first copies
        assert not try_add(store, MOSS)
        assert 'a copy is in plants.jsonl.torn-1' in caplog.text


class TestFailedSync:
    @pytest.fixture
    def doubtful(self, path, disk):
        """Return an open store whose second plant is in doubt: its sync failed."""
        with JSONLinesStore(path) as store:
            store.add(FERN)
            disk.before = Fault('fdatasync', 1, failing(errno.EIO))
            assert not try_add(store, MOSS)
            disk.resume()
            yield store

    def test_store_refuses_after_a_failed_sync(self, path, disk, doubtful):
        adds = [partial(doubtful.add, plant) for plant in (MOSS, IVY, FERN)]
        assert_raise(StoreUnavailable, *2 * [*adds, doubtful.ping])
        assert path.read_bytes() == lines(FERN, MOSS)
        assert disk.durable == lines(FERN)

    @pytest.mark.parametrize('with_index', [True, False], ids=['index', 'no-index'])
    @pytest.mark.parametrize('failures', [0, 3])
    def test_next_open_writes_doubtful_lines_again(
        self, path, disk, doubtful, with_index, failures
    ):
        """Lines in doubt stay so while the syncs of each open fail."""

        def fail_an_open(name, target, *arguments):
            if name == 'fsync' and path_of(target) == str(path):
                raise failure(errno.EIO)

        doubtful.close()
        if not with_index:
            index_of(path).unlink()
        with JSONLinesStore(path) as store:
            disk.before = fail_an_open
            for _ in range(failures):
                assert not try_add(store, MOSS)
            disk.resume()
        with JSONLinesStore(path) as store:
            store.add(MOSS)
            # A sync alone would lose them: the kernel takes their pages for clean.
            assert disk.durable == lines(FERN, MOSS)

    def test_lines_in_doubt_are_known_beside_a_new_index(self, path, disk):
        store, other, third = (JSONLinesStore(path) for _ in range(3))
        with store, other, third:
            store.add(FERN)
            index_of(path).unlink()
            other.ping()
            disk.before = Fault('fdatasync', 1, failing(errno.EIO))
            assert not try_add(store, MOSS)
            disk.resume()
            third.add(MOSS)
            assert disk.durable == lines(FERN, MOSS)

    @pytest.mark.parametrize('first', [2, 3], ids=['lock', 'sync'])
    def test_exchanged_file_is_not_synced_for_another(self, path, disk, first):
        """A store locks and syncs the file it writes, also if it was exchanged."""
        path.touch()
        other = path.with_name('other')
        other.touch()
        opens = itertools.count()

        def exchange(name, target, *arguments):
            # Another file is there while one of its descriptors is opened.
            is_open = name == 'open' and target == path
            if is_open and next(opens) in (first, first + 1):
                path.rename(path.with_name('third'))
                other.rename(path)
                path.with_name('third').rename(other)

        disk.before = exchange
        with JSONLinesStore(path) as store:
            assert not try_add(store, FERN)
            assert next(opens) > first
            assert not {str(path), str(other)} & {*open_paths()}
            store.add(FERN)
        assert disk.durable == lines(FERN)

    def test_failed_sync_during_a_close_leaves_doubt(self, path, disk, pool):
        store = JSONLinesStore(path)
        store.add(FERN)
        with blocked_syncs(disk) as gate:
            add = pool.submit(store.add, MOSS)
            gate.wait_for(1)
            close = pool.submit(store.close)
            with contextlib.suppress(TimeoutError):
                close.result(0.1)
            gate.failing.update(gate.held)
        assert_raise(StoreUnavailable, partial(add.result, PATIENCE))
        close.result(PATIENCE)
        fill(path, MOSS)
        assert disk.durable == lines(FERN, MOSS)

    def test_syncs_in_flight_share_no_descriptor(self, path, disk, pool, slow_syncs):
        plants = [Plant(number, 'Fern') for number in range(10, 30)]
        most = group_commit.SLOW_SYNCS_IN_FLIGHT
        with JSONLinesStore(path) as store:
            store.add(FERN)
            with blocked_syncs(disk) as gate:
                adds = add_each(pool, gate, store, *plants[:most])
                adds += [pool.submit(store.add, plant) for plant in plants[most:]]
                assert len(set(gate.held)) == len(gate.held) == most
            assert all(add.result(PATIENCE) for add in adds)
        assert sorted(raw_plants(disk.durable)) == [FERN, *plants]

    def test_sync_covers_what_was_written_before_it(self, path, disk, pool, slow_syncs):
        """A repeat of a later line waits for a sync of its own, and so does a flush."""
        with JSONLinesStore(path) as store:
            store.add(FERN)
            with blocked_syncs(disk) as gate:
                first, _ = add_each(pool, gate, store, MOSS, IVY)
                assert store._backend()._index.flush()
                with contextlib.closing(sqlite3.connect(index_of(path))) as table:
                    assert [*table.execute('SELECT id FROM plants')] == [(FERN.id,)]
                gate.release(gate.held[0])
                assert first.result(PATIENCE)
                pool.submit(store.add, IVY)
                gate.wait_for(3)

    def test_success_after_a_failed_sync_is_not_believed(
        self, path, disk, pool, slow_syncs
    ):
        """After a failed sync another one in flight counts as failed, too."""
        with JSONLinesStore(path) as store:
            store.add(FERN)
            with blocked_syncs(disk) as gate:
                adds = add_each(pool, gate, store, MOSS, IVY)
                first, second = gate.held
                gate.failing.add(first)
                gate.release(first)
                wait_until(lambda: any(add.done() for add in adds))
                disk.skip_failures(second)
            results = (partial(add.result, PATIENCE) for add in adds)
            assert_raise(StoreUnavailable, *results)


@pytest.mark.parametrize('slow', [True, False], ids=['slow-disk', 'quick-disk'])
@pytest.mark.parametrize('shared', [True, False], ids=['same-store', 'another'])
@pytest.mark.parametrize('plant', [MOSS, MOSS._replace(name='Fern')], ids=repr)
def test_answer_rests_on_a_durable_line(path, disk, pool, request, slow, shared, plant):
    """A repeat or a refusal waits until the line that it rests on is durable."""
    if slow:
        request.getfixturevalue('slow_syncs')
    store = JSONLinesStore(path)
    with store, store if shared else JSONLinesStore(path) as other:
        store.add(FERN)
        other.add(FERN)
        with blocked_syncs(disk) as gate:
            first = pool.submit(store.add, MOSS)
            gate.wait_for(1)
            answer = pool.submit(other.add, plant)
            if slow or not shared:
                gate.wait_for(2)
            with pytest.raises(TimeoutError):
                answer.result(0.05)
            assert disk.durable == lines(FERN)
            if len(gate.held) > 1:
                # Any one sync that began after the write is enough.
                gate.release(gate.held[1])
                answer.exception(PATIENCE)
                assert disk.durable == lines(FERN, MOSS)
        assert (answer.exception(PATIENCE) is None) is (plant == MOSS)
        assert first.result(PATIENCE)
    assert path.read_bytes() == disk.durable == lines(FERN, MOSS)
