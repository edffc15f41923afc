"""Group commit: callers that wait together share one append and one sync."""

import bisect
import contextlib
import itertools
import random
import signal
import threading
from collections import Counter
from functools import partial
from unittest.mock import Mock

import pytest
from disk import Gate
from store.group_commit import SLOW_SYNCS_IN_FLIGHT, GroupCommit
from waiting import in_threads, wait_until

from store import StoreClosed, StoreUnavailable, group_commit
from store.scheduler import THREADS


class Failure(Exception):
    """The error of an append or a sync in these tests."""


class Commits:
    """The append and the sync of a group commit; notes when each begins and ends."""

    def __init__(self):
        self.clock = itertools.count()
        self.batches = []  # the records of each append
        self.appended = {}  # from each record to the time when its append ended
        self.syncs = []  # when each successful sync began and ended
        self.at_once = []  # for each sync that began, how many were in flight
        self.observed = []  # the size and the time of each sync
        self.before_append = self.before_sync = lambda: None  # may block or raise
        self.choose = lambda batch: True  # whether the batch needs a sync
        self._appending = threading.Lock()
        self._in_flight = []
        self._queue = GroupCommit(
            THREADS,
            self._append,
            observe=lambda *sync: self.observed.append(sync),
            late=lambda: StoreUnavailable('late'),
        )
        self.close = self._queue.close
        self.start_committer = self._queue._start_committer

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
        self._in_flight.append(began)
        self.at_once.append(len(self._in_flight))
        try:
            self.before_sync()
            self.syncs.append((began, next(self.clock)))
        finally:
            self._in_flight.remove(began)

    def submit(self, record, size=1):
        self._queue.submit(record, size)

    def waiting(self):
        return len(self._queue._waiting)

    def submit_behind(self, gate, *jobs, then=None):
        """Run a job that blocks at a gate until others queue behind it, in order."""

        def follow(place, job):
            wait_until(lambda: gate.held and self.waiting() == place)
            job()

        jobs = [*jobs, then or gate.open]
        followers = [partial(follow, place, job) for place, job in enumerate(jobs[1:])]
        in_threads(jobs[0], *followers)


@pytest.fixture
def quick_syncs(monkeypatch):
    """Let every sync appear to take no time."""
    monkeypatch.setattr(group_commit, 'perf_counter', lambda: 0.0)


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
def test_records_that_wait_are_a_batch(quick_syncs, monkeypatch, where, sizes, batches):
    """Records that wait are one batch, in their order; it ends at BATCH_BYTES."""
    monkeypatch.setattr(group_commit, 'BATCH_BYTES', 100)
    commits, gate = Commits(), Gate()
    setattr(commits, where, gate)
    sizes = enumerate([1, *sizes])
    commits.submit_behind(gate, *(partial(commits.submit, *size) for size in sizes))
    assert commits.batches == [[0], *batches]
    assert [plants for plants, _ in commits.observed] == [1, *map(len, batches)]


def test_quick_syncs_do_not_overlap(slow_syncs, monkeypatch):
    """While syncs are quick, only one is in flight, also after slow ones."""
    commits = Commits()
    commits.submit('slow')
    monkeypatch.setattr(group_commit, 'perf_counter', lambda: 0.0)
    commits.submit('quick')
    commits.before_sync = gate = Gate()
    commits.submit_behind(gate, *(partial(commits.submit, at) for at in range(3)))
    assert commits.batches[2:] == [[0], [1, 2]]
    assert max(commits.at_once) == 1


def test_slow_syncs_overlap_up_to_a_limit(slow_syncs, monkeypatch):
    """While syncs are slow, several are in flight, up to a limit."""
    commits, start, ended = Commits(), THREADS.start, []
    # Not by a count of all threads: one of the test before may begin only now.
    starts = Mock(side_effect=lambda run: start(lambda: ended.append(run())))
    monkeypatch.setattr(THREADS, 'start', starts)
    for _ in range(9):  # as first callers that come at once
        commits.start_committer()
    commits.submit('its sync is measured as slow')
    commits.before_sync = gate = Gate()
    places = range(SLOW_SYNCS_IN_FLIGHT + 3)

    def run(place):
        # One at a time, so that each is a batch of one until the limit is reached.
        held = min(place, SLOW_SYNCS_IN_FLIGHT)
        wait_until(lambda: (len(gate.held), commits.waiting()) == (held, place - held))
        if place == len(places):
            assert not returned
            gate.open()
        else:
            commits.submit(place)
            returned.append(place)

    returned = []
    in_threads(*(partial(run, place) for place in [*places, len(places)]))
    assert max(commits.at_once) == SLOW_SYNCS_IN_FLIGHT
    assert commits.batches[-1] == list(places)[SLOW_SYNCS_IN_FLIGHT:]
    commits.close()
    wait_until(lambda: len(ended) == starts.call_count, 'all committers end')


def test_slow_syncs_need_no_second_thread(slow_syncs, monkeypatch):
    """Where no other thread can be started, one commits all."""
    commits = Commits()
    commits.submit(0)
    monkeypatch.setattr(THREADS, 'start', Mock(side_effect=RuntimeError('no more')))
    for record in 1, 2:
        commits.submit(record)
    assert commits.batches == [[0], [1], [2]]


def test_quick_failures_wait_for_no_slow_sync(quick_syncs):
    """While syncs fail quickly, as in an outage, no batch waits for a slow one."""
    commits, gate, fail = Commits(), Gate(), Mock(side_effect=Failure)

    def submit_behind():
        gate.wait_for()
        commits.before_sync = fail
        for record in range(10):
            with pytest.raises(Failure):
                commits.submit(record)
        gate.open()

    commits.before_sync = fail
    with pytest.raises(Failure):
        commits.submit('first')
    commits.before_sync = gate
    in_threads(submit_behind, lambda: commits.submit('slow'))


@pytest.mark.parametrize('where', ['append', 'sync'])
@pytest.mark.parametrize('error', [KeyboardInterrupt(), SystemExit()])
def test_failure_reaches_all_callers_of_the_batch(quick_syncs, where, error):
    """An append or a sync that raises fails all callers of its batch and no others."""
    commits, gate = Commits(), Gate()

    def fail_second():
        gate()
        if len(commits.batches) == 2:
            raise error

    setattr(commits, f'before_{where}', fail_second)
    raised = {}

    def submit(record):
        try:
            commits.submit(record)
        except BaseException as ex:
            raised[record] = ex

    commits.submit_behind(gate, *(partial(submit, at) for at in range(4)))
    assert commits.batches == [[0], [1, 2, 3]]
    assert len(commits.syncs) == 1
    assert raised.keys() == {1, 2, 3}
    # The error itself would end the thread of each caller.
    assert {type(each) for each in raised.values()} == {StoreUnavailable}
    commits.submit(4)
    assert commits.batches[2:] == [[4]]
    assert len(commits.syncs) == 2
    # A failed sync is observed as any other.
    assert len(commits.observed) == (3 if where == 'sync' else 2)


def test_interrupted_waiter_stops_no_other(quick_syncs):
    """A waiter that a signal interrupts takes its record along; others are served."""
    commits = Commits()
    commits.before_append = gate = Gate()
    main = threading.get_ident()

    def interrupt():
        gate.wait_for()  # before that the first record waits, too
        wait_until(commits.waiting)
        while commits.waiting():  # a signal just before the wait would not end it
            signal.pthread_kill(main, signal.SIGINT)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not commits.waiting(), seconds=1)
        gate.open()
        commits.submit(2)

    # Signals interrupt only the main thread, so that one waits here.
    jobs = partial(commits.submit, 0), interrupt
    others = threading.Thread(target=in_threads, args=jobs, daemon=True)
    others.start()
    gate.wait_for()
    with pytest.raises(KeyboardInterrupt):
        commits.submit(1)
    others.join()
    assert commits.batches == [[0], [2]]


@pytest.mark.parametrize(
    ('before', 'reason'),
    [
        ('', 'late'),
        ('full', 'full'),
        ('full, synced', 'late'),
        ('full, without a sync', 'late'),
    ],
)
def test_waiter_leaves_in_time(quick_syncs, monkeypatch, before, reason):
    """Who waits too long hears of the latest batch if it failed, and is not stored."""
    commits, full = Commits(), StoreUnavailable('full')
    with contextlib.closing(commits):
        for outcome in before.split(', '):
            is_full = outcome == 'full'
            commits.before_append = Mock(side_effect=full if is_full else None)
            commits.choose = lambda batch: batch[0].item != 'without a sync'
            with contextlib.suppress(StoreUnavailable):
                commits.submit(outcome)
        commits.batches.clear()
        monkeypatch.setattr(group_commit, 'WAIT_WITHIN', 0.05)
        commits.before_append = gate = Gate()
        for record in 1, 2:
            with pytest.raises(StoreUnavailable, match=reason):
                commits.submit(record)
        gate.open()
        monkeypatch.undo()
        commits.submit(3)
    # The committer blocks with the first that it takes, if it wakes before that leaves.
    assert commits.batches in ([[1], [3]], [[2], [3]], [[3]])


def test_closed_queue_refuses(quick_syncs):
    """After a close, records that wait and later ones are refused."""
    commits = Commits()
    commits.before_append = gate = Gate()

    def refused(record):
        with pytest.raises(StoreClosed):
            commits.submit(record)

    def close():
        commits.close()
        gate.open()

    jobs = partial(commits.submit, 0), partial(refused, 1)
    commits.submit_behind(gate, *jobs, then=close)
    refused(2)
    assert commits.batches == [[0]]


@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('speed', ['quick', 'slow'])
@pytest.mark.parametrize('failing', [False, True], ids=['sound', 'failing'])
def test_random_load_reports_every_outcome(request, monkeypatch, seed, speed, failing):
    """Under random load and failures each caller learns the outcome of its record."""
    request.getfixturevalue(f'{speed}_syncs')
    monkeypatch.setattr(group_commit, 'BATCH_BYTES', 40)
    chance = random.Random(seed)
    commits = Commits()
    local = threading.local()  # a batch is appended and synced by one thread
    outcomes = {}  # from each record to the error of itself or its batch, or None

    def fails():
        return failing and chance.random() < 0.1

    def fail(records):
        error = Failure()
        outcomes.update(dict.fromkeys(records, error))
        return error

    def choose(batch):
        local.batch = [entry.item for entry in batch]
        for record in local.batch:
            assert record not in outcomes, 'appended twice'
            outcomes[record] = None
        if fails():
            raise fail(local.batch)
        for entry in batch:
            if fails():
                entry.error = fail([entry.item])
        return chance.random() < 0.9 or not all(entry.error for entry in batch)

    def before_sync():
        if fails():
            raise fail(local.batch)

    commits.choose, commits.before_sync = choose, before_sync
    returned, raised = {}, {}

    def submit_all(name):
        sizes = random.Random(name)
        for number in range(100):
            record = (name, number)
            try:
                commits.submit(record, sizes.randrange(30))
                returned[record] = next(commits.clock)
            except Failure as ex:
                raised[record] = ex

    in_threads(*(partial(submit_all, name) for name in range(32)))
    records = {(name, number) for name in range(32) for number in range(100)}
    assert Counter(itertools.chain(*commits.batches)) == Counter(records)
    assert returned.keys() | raised.keys() == records
    assert raised == {record: error for record, error in outcomes.items() if error}
    assert max(commits.at_once) <= (1 if speed == 'quick' else SLOW_SYNCS_IN_FLIGHT)
    assert not commits.waiting()
    # A sync lies between each record's append and its return.
    begins, ends = zip(*sorted(commits.syncs), strict=True)
    # For each sync, the earliest end of it and all later ones.
    ends = list(itertools.accumulate(reversed(ends), min))[::-1]
    for record, moment in returned.items():
        next_sync = bisect.bisect(begins, commits.appended[record])
        assert ends[next_sync] < moment
    if not failing:  # no leader is left behind
        in_threads(lambda: commits.submit('alone'))
