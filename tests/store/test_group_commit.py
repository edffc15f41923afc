"""Group commit: callers that wait together share one append and one sync."""

import bisect
import contextlib
import itertools
import random
import signal
import threading
from collections import Counter
from functools import partial

import pytest

from store import StoreClosed, StoreUnavailable, group_commit
from store.group_commit import SLOW_SYNCS_IN_FLIGHT, GroupCommit
from store.scheduler import THREADS
from store.testing.waiting import PATIENCE, in_threads, wait_until


class Failure(Exception):
    """The error of an append or a sync in these tests."""


class Gate:
    """Blocks every caller until it is opened; counts the callers."""

    def __init__(self):
        self._opened = threading.Event()
        self.held = 0
        self.open = self._opened.set

    def __call__(self):
        self.held += 1
        assert self._opened.wait(PATIENCE)


class Disk:
    """The append and the sync of a group commit; notes when each begins and ends."""

    def __init__(self):
        self.clock = itertools.count()
        self.batches = []  # the records of each append
        self.appended = {}  # from each record to the time when its append ended
        self.syncs = []  # when each successful sync began and ended
        self.most_syncs = 0  # in flight at once
        self.observed = []  # the size and the time of each sync
        self.before_append = self.before_sync = lambda: None  # may block or raise
        self.choose = lambda batch: True  # whether the batch needs a sync
        self._appending = threading.Lock()
        self._syncing = 0
        self._count = threading.Lock()
        self.commit = GroupCommit(
            THREADS,
            self._append,
            observe=lambda *sync: self.observed.append(sync),
            late=lambda: StoreUnavailable('late'),
        )

    def _append(self, batch):
        assert self._appending.acquire(blocking=False), 'two appends at once'
        try:
            self.batches.append([entry.item for entry in batch])
            self.before_append()
            needs_sync = self.choose(batch)
            for entry in batch:
                self.appended[entry.item] = next(self.clock)
            return self._sync if needs_sync else None
        finally:
            self._appending.release()

    def _sync(self):
        began = next(self.clock)
        with self._count:
            self._syncing += 1
            self.most_syncs = max(self.most_syncs, self._syncing)
        try:
            self.before_sync()
            self.syncs.append((began, next(self.clock)))
        finally:
            with self._count:
                self._syncing -= 1

    def submit(self, record, size=1):
        self.commit.submit(record, size)

    def close(self):
        self.commit.close()

    def waiting(self):
        return len(self.commit._waiting)


@pytest.fixture
def quick(monkeypatch):
    """Let every sync appear to take no time."""
    monkeypatch.setattr(group_commit, 'perf_counter', lambda: 0.0)


@pytest.fixture
def slow(monkeypatch):
    """Let every sync appear to take a second or more."""
    ticks = itertools.count()
    monkeypatch.setattr(group_commit, 'perf_counter', lambda: next(ticks))


def run_behind(disk, first, *jobs, gate):
    """Run a job that blocks at a gate until other jobs queue behind it, in order."""

    def follow(place, job):
        wait_until(lambda: gate.held and disk.waiting() == place)
        job()

    def release():
        wait_until(lambda: gate.held and disk.waiting() == len(jobs))
        gate.open()

    followers = [partial(follow, place, job) for place, job in enumerate(jobs)]
    in_threads(first, *followers, release)


@pytest.mark.parametrize('where', ['before_append', 'before_sync'])
@pytest.mark.parametrize(
    ('sizes', 'batches'),
    [
        ([1] * 9, [[1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        ([40, 40, 40, 40], [[1, 2, 3], [4]]),
        ([100, 1, 99, 1], [[1], [2, 3], [4]]),
        ([1000, 1000, 1000], [[1], [2], [3]]),
        ([99, 1000, 1], [[1, 2], [3]]),
        ([0, 0, 0], [[1, 2, 3]]),
    ],
)
def test_records_that_wait_share_a_batch(quick, monkeypatch, where, sizes, batches):
    """Records that wait are one batch, in their order; it ends at BATCH_BYTES."""
    monkeypatch.setattr(group_commit, 'BATCH_BYTES', 100)
    disk, gate = Disk(), Gate()
    setattr(disk, where, gate)
    jobs = [partial(disk.submit, at, size) for at, size in enumerate([1, *sizes])]
    run_behind(disk, *jobs, gate=gate)
    assert disk.batches == [[0], *batches]
    assert [plants for plants, _ in disk.observed] == [1, *map(len, batches)]


def test_batch_without_need_gets_no_sync(quick):
    """When the append says that a batch needs no sync, there is none."""
    disk = Disk()
    disk.choose = lambda batch: False
    disk.before_append = gate = Gate()
    run_behind(disk, *(partial(disk.submit, at) for at in range(3)), gate=gate)
    assert disk.batches == [[0], [1, 2]]
    assert not disk.syncs
    assert not disk.observed


def test_quick_syncs_do_not_overlap(slow, monkeypatch):
    """While syncs are quick, only one is in flight, also after slow ones."""
    disk = Disk()
    disk.submit('slow')
    monkeypatch.setattr(group_commit, 'perf_counter', lambda: 0.0)
    disk.submit('quick')
    disk.before_sync = gate = Gate()
    run_behind(disk, *(partial(disk.submit, at) for at in range(3)), gate=gate)
    assert disk.batches[2:] == [[0], [1, 2]]
    assert disk.most_syncs == 1


def test_slow_syncs_overlap_up_to_a_limit(slow):
    """While syncs are slow, several are in flight, up to a limit."""
    disk = Disk()
    disk.submit('its sync is measured as slow')
    disk.before_sync = gate = Gate()
    places = range(SLOW_SYNCS_IN_FLIGHT + 3)

    def run(place):
        # One at a time, so that each is a batch of one until the limit is reached.
        held = min(place, SLOW_SYNCS_IN_FLIGHT)
        wait_until(lambda: (gate.held, disk.waiting()) == (held, place - held))
        gate.open() if place == len(places) else disk.submit(place)

    in_threads(*(partial(run, place) for place in [*places, len(places)]))
    assert disk.most_syncs == SLOW_SYNCS_IN_FLIGHT
    assert disk.batches[-1] == list(places)[SLOW_SYNCS_IN_FLIGHT:]


def test_quick_failures_wait_for_no_slow_sync(quick):
    """While syncs fail quickly, as in an outage, no batch waits for a slow one."""
    disk, gate = Disk(), Gate()

    def fail():
        raise Failure

    def submit_behind():
        wait_until(lambda: gate.held)
        disk.before_sync = fail
        for record in range(10):
            with pytest.raises(Failure):
                disk.submit(record)
        gate.open()

    disk.before_sync = fail
    with pytest.raises(Failure):
        disk.submit('first')
    disk.before_sync = gate
    in_threads(submit_behind, lambda: disk.submit('slow'))


@pytest.mark.parametrize('where', ['append', 'sync'])
@pytest.mark.parametrize('error', [Failure(), KeyboardInterrupt(), SystemExit()])
def test_failure_reaches_all_callers_of_the_batch(quick, where, error):
    """An append or a sync that raises fails all callers of its batch and no others."""
    disk, gate = Disk(), Gate()

    def fail_second():
        gate()
        if len(disk.batches) == 2:
            raise error

    setattr(disk, f'before_{where}', fail_second)
    raised = {}

    def submit(record):
        try:
            disk.submit(record)
        except BaseException as ex:
            raised[record] = ex

    run_behind(disk, *(partial(submit, at) for at in range(4)), gate=gate)
    assert disk.batches == [[0], [1, 2, 3]]
    assert len(disk.syncs) == 1
    assert raised.keys() == {1, 2, 3}
    for each in raised.values():
        if isinstance(error, Failure):
            assert each is error
        else:  # it would end the thread of each caller
            assert isinstance(each, StoreUnavailable)
    disk.submit(4)
    assert disk.batches[2:] == [[4]]
    assert len(disk.syncs) == 2


def test_failed_sync_replaces_the_error_of_a_record(slow):
    """A failed sync replaces the refusal of a record, and is observed as any other."""
    failed = Failure('sync')
    disk = Disk()
    disk.submit(0)

    def refuse(batch):
        batch[0].error = Failure('refused')
        return True

    def fail():
        raise failed

    disk.choose, disk.before_sync = refuse, fail
    with pytest.raises(Failure) as caught:
        disk.submit(1)
    assert caught.value is failed
    assert disk.observed == [(1, 1), (1, 1)]


def test_interrupted_waiter_stops_no_other(quick):
    """A waiter that a signal interrupts takes its record along; others are served."""
    disk = Disk()
    disk.before_append = gate = Gate()
    main = threading.get_ident()

    def interrupt():
        wait_until(disk.waiting)
        signal.pthread_kill(main, signal.SIGINT)
        wait_until(lambda: not disk.waiting())
        gate.open()
        disk.submit(2)

    # Signals interrupt only the main thread, so that one waits here.
    jobs = [lambda: disk.submit(0), interrupt]
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    threads[0].start()
    wait_until(lambda: gate.held)
    threads[1].start()
    with pytest.raises(KeyboardInterrupt):
        disk.submit(1)
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert disk.batches == [[0], [2]]


@pytest.mark.parametrize('failed', [True, False], ids=['after a failure', 'first'])
def test_waiter_leaves_in_time(quick, monkeypatch, failed):
    """Who waits too long gets the reason of the latest failure, and is not stored."""
    disk, failure = Disk(), StoreUnavailable('full')

    def refuse():
        if failed:
            raise failure

    with contextlib.closing(disk):
        disk.before_append = refuse
        with contextlib.suppress(StoreUnavailable):
            disk.submit(0)
        monkeypatch.setattr(group_commit, 'WAIT_WITHIN', 0.05)
        disk.before_append = gate = Gate()
        for record in 1, 2:
            with pytest.raises(StoreUnavailable, match='full' if failed else 'late'):
                disk.submit(record)
        gate.open()
        monkeypatch.undo()
        disk.submit(3)
    # The committer blocks with the first that it takes, if it wakes before that leaves.
    assert disk.batches in ([[0], [1], [3]], [[0], [2], [3]], [[0], [3]])


def test_closed_queue_refuses(quick):
    """After a close, records that wait and later ones are refused."""
    disk, gate = Disk(), Gate()
    disk.before_append = gate

    def refused(record):
        with pytest.raises(StoreClosed):
            disk.submit(record)

    def close_behind():
        wait_until(lambda: gate.held and disk.waiting())
        disk.close()
        gate.open()

    def refuse_behind():
        wait_until(lambda: gate.held)
        refused(1)

    in_threads(lambda: disk.submit(0), refuse_behind, close_behind)
    refused(2)
    assert disk.batches == [[0]]


@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('speed', ['quick', 'slow'])
@pytest.mark.parametrize('failing', [False, True], ids=['sound', 'failing'])
def test_random_load_reports_every_outcome(request, monkeypatch, seed, speed, failing):
    """Under random load and failures each caller learns the outcome of its record."""
    request.getfixturevalue(speed)
    monkeypatch.setattr(group_commit, 'BATCH_BYTES', 40)
    chance = random.Random(seed)
    disk = Disk()
    local = threading.local()  # a batch is appended and synced by one thread
    outcomes = {}  # from each record to the error of itself or its batch, or None

    def choose(batch):
        local.batch = [entry.item for entry in batch]
        for record in local.batch:
            assert record not in outcomes, 'appended twice'
            outcomes[record] = None
        if failing and chance.random() < 0.1:
            raise fail(local.batch)
        for entry in batch:
            if failing and chance.random() < 0.1:
                entry.error = fail([entry.item])
        return chance.random() < 0.9 or not all(entry.error for entry in batch)

    def fail(records):
        error = Failure()
        outcomes.update(dict.fromkeys(records, error))
        return error

    def before_sync():
        if failing and chance.random() < 0.1:
            raise fail(local.batch)

    disk.choose = choose
    disk.before_sync = before_sync
    returned = {}
    raised = {}

    def submit_all(name):
        sizes = random.Random(name)
        for number in range(100):
            record = (name, number)
            try:
                disk.submit(record, sizes.randrange(30))
            except Failure as ex:
                raised[record] = ex
            else:
                returned[record] = next(disk.clock)

    in_threads(*(lambda name=name: submit_all(name) for name in range(32)))
    records = {(name, number) for name in range(32) for number in range(100)}
    assert Counter(itertools.chain(*disk.batches)) == Counter(records)
    assert returned.keys() | raised.keys() == records
    assert raised == {record: error for record, error in outcomes.items() if error}
    assert disk.most_syncs <= (1 if speed == 'quick' else SLOW_SYNCS_IN_FLIGHT)
    assert not disk.waiting()
    # A sync lies between each record's append and its return.
    syncs = sorted(disk.syncs)
    begins = [began for began, _ in syncs]
    # For each sync, the earliest end of it and all later ones.
    ends = list(itertools.accumulate((end for _, end in reversed(syncs)), min))[::-1]
    for record, moment in returned.items():
        next_sync = bisect.bisect(begins, disk.appended[record])
        assert ends[next_sync] < moment
    if not failing:  # no leader is left behind
        in_threads(lambda: disk.submit('alone'))
