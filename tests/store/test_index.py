import contextlib
import errno
import itertools
import mmap
import os
import random
import struct
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.stateful import invariant
from hypothesis.stateful import rule
from hypothesis.stateful import run_state_machine_as_test
from store_contract import IDS

from store import index as id_index
from store.index import CAPACITY
from store.index import PAGE
from store.index import Identity
from store.index import Index
from store.index import IndexDamaged
from store.index import build

IDENTITY = Identity(device=1, inode=2, boot=bytes(range(16)))
INT64 = st.integers(-(2**63), 2**63 - 1)

# Far more than 50,000 ids need, so that an index that runs away is stopped.
MOST_BYTES = 64 * 2**20


class BoundedSystem:
    """Gives files room up to a limit; the disk is full beyond it."""

    def __init__(self, most=MOST_BYTES):
        self.most = most

    def posix_fallocate(self, fd, offset, length):
        if offset + length > self.most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, length)


@contextlib.contextmanager
def opened(path, system=None):
    """Open an index as a process would that has never seen it."""
    fd = os.open(path, os.O_RDWR)
    try:
        index = Index(fd, system or BoundedSystem())
        try:
            yield index
        finally:
            index.close()
    finally:
        os.close(fd)


@pytest.fixture
def path(tmp_path):
    """Where an index without entries is."""
    path = tmp_path / 'plants.jsonl.index'
    build(path, IDENTITY, [])
    return path


def put(index, id, offset):
    """Enter an id, with room for it."""
    index.reserve(1)
    index.put(id, offset)


def fill(path, entries):
    """Enter many ids, one after the other."""
    with opened(path) as index:
        for id, offset in entries:
            put(index, id, offset)


def scattered(count, seed=1):
    """Return that many different ids."""
    chance = random.Random(seed)
    return list({chance.getrandbits(64) - 2**63: None for _ in range(count)})


PATTERNS = {
    'sequential': range(50_000),
    'descending': range(-1, -20_001, -1),
    'random': scattered(50_000),
    'around-zero': range(-10_000, 10_000),
    'edges': [*range(2**63 - 5000, 2**63), *range(-(2**63), -(2**63) + 5000)],
    **{
        f'multiples-of-2**{bits}': [
            number << bits
            for number in range(
                -min(4000, 2 ** (63 - bits)), min(4000, 2 ** (63 - bits))
            )
        ]
        for bits in (1, 20, 31, 32, 33, 44, 52, 56, 58)
    },
}


@pytest.mark.parametrize('ids', PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize('how', ['put', 'build'])
def test_growth(tmp_path, ids, how):
    """However many ids there are, and whatever they share, each is found again."""
    path = tmp_path / 'index'
    if how == 'put':
        ids = ids[:15_000]  # the directory has doubled often enough
    entries = [(id, offset) for offset, id in enumerate(ids)]
    if how == 'put':
        build(path, IDENTITY, [])
        fill(path, entries)
    else:
        assert build(path, IDENTITY, entries, BoundedSystem()) == []
    with opened(path) as index:
        for id, offset in entries:
            assert index.get(id) == offset
        present = set(ids)
        for id in scattered(1000, seed=2):
            assert id in present or index.get(id) is None
    assert path.stat().st_size <= max(2**17, 128 * len(ids))


@pytest.mark.parametrize('shift', [0, 24, 32, 48])
def test_growth_with_any_secret(tmp_path, monkeypatch, shift):
    """Ids in steps are found again, whatever the secret number of the index is."""
    path = tmp_path / 'index'
    secrets = [0, 2**32, 2**64 - 1, 0x1234567812345678]
    secrets += [random.Random(seed).getrandbits(64) for seed in range(4)]
    entries = [(number << shift, number + 5) for number in range(3000)]
    for secret in secrets:
        monkeypatch.setattr(
            random.SystemRandom, 'getrandbits', lambda self, bits, secret=secret: secret
        )
        build(path, IDENTITY, [])
        fill(path, entries)
        with opened(path) as index:
            assert [(id, index.get(id)) for id, _ in entries] == entries


def test_build_with_full_buckets(tmp_path):
    """An index that is built at once is right, also where too many fall in a bucket."""
    path = tmp_path / 'index'
    # As many as fill the buckets most: with one more there are twice as many.
    entries = [(id, offset) for offset, id in enumerate(scattered(20 * 2**11 - 1))]
    assert build(path, IDENTITY, iter(entries)) == []
    with opened(path) as index:
        assert [(id, index.get(id)) for id, _ in entries] == entries
        assert index._header.pages > 1 + 2**11 * 4 // PAGE + 2**11


def test_build_equals_puts(tmp_path):
    """An index that was built at once and one of puts give the same answers."""
    entries = [(id, offset) for offset, id in enumerate([*IDS, *scattered(2000)])]
    build(tmp_path / 'built', IDENTITY, entries)
    build(tmp_path / 'put', IDENTITY, [])
    fill(tmp_path / 'put', entries)
    asked = [*(id for id, _ in entries), *scattered(2000, seed=2)]
    with opened(tmp_path / 'built') as built, opened(tmp_path / 'put') as of_puts:
        for id in asked:
            assert built.get(id) == of_puts.get(id)
        more = [(id, 7) for id in scattered(5000, seed=3)]
        for index in (built, of_puts):
            for id, offset in more:
                put(index, id, offset)
            assert [(id, index.get(id)) for id, _ in more] == more
            assert [(id, index.get(id)) for id, _ in entries] == entries


def test_build_reports_repeats(tmp_path):
    """A build reports each entry whose id had come before, and keeps the first."""
    path = tmp_path / 'index'
    ids = [1, 2, 1, -3, 2, 1, *range(100, 5000), 4999, 100]
    entries = [(id, offset) for offset, id in enumerate(ids)]
    seen = set()
    later = [(id, at) for id, at in entries if id in seen or seen.add(id)]
    assert sorted(build(path, IDENTITY, entries)) == sorted(later)
    with opened(path) as index:
        assert [index.get(id) for id in (1, 2, -3, 100, 4999)] == [0, 1, 3, 6, 4905]


def test_build_overwrites(path):
    """A build forgets what was in the file before, however long that was."""
    fill(path, [(id, 1) for id in range(5000)])
    build(path, IDENTITY, [(7, 70)])
    with opened(path) as index:
        assert [index.get(id) for id in (6, 7, 8)] == [None, 70, None]


def test_build_on_a_full_disk(tmp_path):
    """A build that finds no room says so."""
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        build(tmp_path / 'index', IDENTITY, [(1, 1)], BoundedSystem(1000))


def test_keys_in_offsets(path):
    """An id is not found in the bytes of an offset, or across two entries."""
    ids = [0x0101010101010101 * number for number in range(1, 100)]
    fill(path, [(id, ids[-at - 1]) for at, id in enumerate(ids)])
    with opened(path) as index:
        for at, id in enumerate(ids):
            assert index.get(id) == ids[-at - 1]
        for byte, other in itertools.permutations(range(1, 100, 7), 2):
            straddling = int.from_bytes(bytes([byte] * 3 + [other] * 5), 'little')
            assert index.get(straddling) is None


class Model(RuleBasedStateMachine):
    """An index that two processes share by turns says what a dict would say."""

    path = None  # given by the test

    def __init__(self):
        super().__init__()
        build(self.path, IDENTITY, [])
        self.offsets = {}
        self.end = 0
        self.open = contextlib.ExitStack()
        self.index, self.other = (
            self.open.enter_context(opened(self.path)) for _ in range(2)
        )

    def teardown(self):
        self.open.close()

    @rule(id=INT64 | st.integers(-3, 3), offset=st.integers(0, 2**64 - 1))
    def put(self, id, offset):
        put(self.index, id, offset)
        self.offsets[id] = offset

    @rule(
        start=INT64,
        step=st.sampled_from([1, -1, 3, 2**32, 2**32 + 1, 2**60 - 1]),
        count=st.integers(1, 2000),
        offset=st.integers(0, 2**63),
    )
    def put_many(self, start, step, count, offset):
        self.index.reserve(count)
        for number in range(count):
            id = (start + number * step + 2**63) % 2**64 - 2**63
            self.index.put(id, offset + number)
            self.offsets[id] = offset + number

    @rule(id=INT64)
    def get(self, id):
        assert self.index.get(id) == self.offsets.get(id)

    @rule(end=st.integers(0, 2**63), tail=st.binary())
    def advance(self, end, tail):
        self.index.advance(end, tail)
        self.end = end

    @rule()
    def take_turns(self):
        self.index, self.other = self.other, self.index
        self.index.refresh()

    @rule()
    def open_again(self):
        self.index = self.open.enter_context(opened(self.path))

    @invariant()
    def right(self):
        assert self.index.end == self.end
        sample = random.Random(len(self.offsets)).sample(
            sorted(self.offsets), min(200, len(self.offsets))
        )
        for id in sample:
            assert self.index.get(id) == self.offsets[id]


def test_model(tmp_path):
    """Whatever is done to an index, it says what a dict would say."""
    Model.path = tmp_path / 'index'
    run_state_machine_as_test(
        Model, settings=settings(max_examples=25, stateful_step_count=15, deadline=None)
    )


# Damage.


@pytest.fixture(scope='module')
def grown_once(tmp_path_factory):
    """The bytes of an index with buckets of several depths, and its entries."""
    path = tmp_path_factory.mktemp('grown') / 'index'
    build(path, IDENTITY, [])
    offsets = {id: 64 * at for at, id in enumerate([*IDS, *scattered(3500)])}
    fill(path, offsets.items())
    return path.read_bytes(), offsets


@pytest.fixture
def grown(path, grown_once):
    """That index, to be damaged, and its entries."""
    text, offsets = grown_once
    path.write_bytes(text)
    return path, offsets


def ask(index, id):
    """Look up an id; return the offset, or the reason why there is no answer."""
    try:
        return index.get(id)
    except IndexDamaged as ex:
        return str(ex)


def assert_never_wrong(index, offsets):
    """Check that every answer is right, or none."""
    for id, offset in offsets.items():
        answer = ask(index, id)
        assert answer == offset or isinstance(answer, str)


def test_damaged_byte(grown):
    """Whatever byte is changed, an answer is right or there is none."""
    path, offsets = grown
    text = path.read_bytes()
    chance = random.Random(20)
    with opened(path) as index:
        header = index._header
    used = header.pages * PAGE
    start = header.directory * PAGE
    directory = range(start, start + (4 << header.depth))
    ids_of = {}
    for id, offset in offsets.items():
        page = text.find(struct.pack('<qQ', id, offset)) // PAGE
        ids_of.setdefault(page, []).append(id)
    places = [
        *range(160),
        *chance.sample(directory, 300),
        *(chance.randrange(PAGE, used) for _ in range(900)),
    ]
    absent = scattered(3, seed=3)
    noticed = 0
    with path.open('r+b', buffering=0) as file:
        for place in places:
            page = place // PAGE
            if place in directory:
                page = int.from_bytes(text[place & -4 : (place & -4) + 4], 'little')
            asked = [*ids_of.get(page, []), *chance.sample(sorted(offsets), 3)]
            file.seek(place)
            file.write(bytes([text[place] ^ chance.randrange(1, 256)]))
            try:
                with opened(path) as index:
                    expected = {id: offsets[id] for id in asked}
                    assert_never_wrong(index, expected | dict.fromkeys(absent))
                    id = chance.choice([*asked, absent[0]])
                    put(index, id, 5)
                    assert_never_wrong(index, expected | {id: 5})
            except IndexDamaged:
                noticed += 1
            file.seek(0)
            file.write(text)
            file.truncate()
    assert noticed > 160


def test_any_pointer(path):
    """A pointer to any page but its own is noticed, also to one that was split."""
    offsets = {}
    with opened(path) as index:
        for offset, id in enumerate(scattered(5000)):
            put(index, id, offset)
            offsets[id] = offset
            if offset > 2000 and index._header.spare:
                break
        header = index._header
    assert header.spare
    text = path.read_bytes()
    first = header.directory * PAGE
    with path.open('r+b', buffering=0) as file, opened(path) as index:
        pages = [*range(0, header.pages + 3, 7), 2**31, 2**32 - 1]
        for number in [header.spare, *pages]:
            file.seek(first)
            file.write(struct.pack('<I', number) * (1 << header.depth))
            asked = sorted(offsets)
            if number != header.spare:
                asked = random.Random(number).sample(asked, 100)
            assert_never_wrong(index, {id: offsets[id] for id in asked})
        file.seek(0)
        file.write(text)
        assert {id: index.get(id) for id in offsets} == offsets


def test_damaged_header(grown):
    """Any change to the header is noticed, also by a process that had it open."""
    path, _ = grown
    text = path.read_bytes()
    size = 4 + id_index._HEADER.size
    with opened(path) as running, path.open('r+b', buffering=0) as file:
        for place, bit in itertools.product(range(size), range(8)):
            file.seek(place)
            file.write(bytes([text[place] ^ 1 << bit]))
            with pytest.raises(IndexDamaged):
                running.refresh()
            with pytest.raises(IndexDamaged), opened(path):
                pass
            file.seek(0)
            file.write(text[:size])
        running.refresh()


@pytest.mark.parametrize('seed', range(20))
def test_exchanged_pages(grown, seed):
    """Pages that have changed places, or are old, are noticed."""
    path, offsets = grown
    before = path.read_bytes()
    fill(path, [(id, 1) for id in scattered(1000, seed=4)])
    text = bytearray(path.read_bytes())
    chance = random.Random(seed)
    for _ in range(10):
        one, other = (PAGE * chance.randrange(1, len(before) // PAGE) for _ in range(2))
        text[one : one + PAGE] = chance.choice([text, before])[other : other + PAGE]
    path.write_bytes(text)
    with contextlib.suppress(IndexDamaged), opened(path) as index:
        assert_never_wrong(index, {id: offsets[id] for id in list(offsets)[:500]})


def test_truncated(grown):
    """An index that was cut short is noticed, wherever it was cut."""
    path, offsets = grown
    text = path.read_bytes()
    with opened(path) as index:
        used = index._header.pages * PAGE
    chance = random.Random(5)
    sizes = [0, 1, 4, 511, 512, 513, 4095, 4096, used - PAGE, used - 1, len(text) - 1]
    for size in [*sizes, *(chance.randrange(used) for _ in range(50))]:
        path.write_bytes(text[:size])
        with pytest.raises(IndexDamaged), opened(path):
            pass
    path.write_bytes(text[:used])
    with opened(path) as index:
        assert {id: index.get(id) for id in offsets} == offsets


@pytest.mark.parametrize('data', [b'x', bytes(1), b'\xff'], ids=ascii)
def test_not_an_index(path, data):
    """A file that is no index is noticed."""
    path.write_bytes(data * 4096)
    with pytest.raises(IndexDamaged), opened(path):
        pass


# A process that is killed.


class Killed(BaseException):
    """The process ends here."""


class MortalMap(mmap.mmap):
    """A map whose owner is killed before, or in the middle of, a certain store."""

    stores = 0
    last = None
    torn = False

    def __setitem__(self, where, data):
        cls = type(self)
        if cls.stores == cls.last:
            if cls.torn:
                start = where.start or 0
                half = len(data) // 2
                super().__setitem__(slice(start, start + half), data[:half])
            raise Killed
        cls.stores += 1
        super().__setitem__(where, data)


@pytest.fixture
def mortal(monkeypatch):
    """The class of map that an index makes; ``last`` says when its owner is killed."""
    cls = type('Mortal', (MortalMap,), {})
    monkeypatch.setattr(id_index.mmap, 'mmap', cls)
    return cls


def is_killed(mortal, last, job):
    """Run a job that is killed after so many stores; return whether it was."""
    mortal.stores, mortal.last = 0, last
    try:
        job()
    except Killed:
        return True
    finally:
        mortal.last = None
    return False


def splits(path, mortal):
    """Yield entries to add and the id whose put splits a bucket then.

    The first split doubles the directory, the second has a page to use again, and the
    last turns many pointers.
    """
    offsets = {}
    found = []
    pointers = 0
    for offset, id in enumerate(scattered(20_000)):
        before = path.read_bytes()
        with opened(path) as index:
            depth = index._header.depth
            spare = bool(index._header.spare)
            index.reserve(1)
            mortal.stores = 0
            index.put(id, offset)
            kind = (index._header.depth > depth, spare, mortal.stores > pointers + 6)
        if mortal.stores > 1 and kind not in found:
            found.append(kind)
            yield before, dict(offsets), id, offset
        offsets[id] = offset
        if mortal.stores > 1:
            pointers = max(pointers, mortal.stores)
        if len(offsets) > 4000:
            return


@pytest.mark.parametrize('torn', [False, True], ids=['between-stores', 'in-a-store'])
def test_killed_in_a_split(path, mortal, torn):
    """A process that is killed anywhere in a split leaves a sound index behind.

    If it was killed in the middle of a store the next process may notice damage.
    """
    mortal.torn = torn
    count = 0
    for before, offsets, id, offset in splits(path, mortal):
        count += 1
        kept = path.read_bytes()
        sample = dict(random.Random(count).sample(sorted(offsets.items()), 100))
        sample |= moved(before, kept, offsets)

        def add(id=id, offset=offset):
            with opened(path) as index:
                put(index, id, offset)

        for last in itertools.count():
            path.write_bytes(before)
            killed = is_killed(mortal, last, add)
            if not killed:
                break
            assert_sound(path, sample, id, offset, torn)
        assert last > 3
        path.write_bytes(kept)
    assert count >= 2


def moved(before, after, offsets):
    """Return the entries that are elsewhere in one index than in another."""
    entries = {id: struct.pack('<qQ', id, offset) for id, offset in offsets.items()}
    return {
        id: offsets[id]
        for id, entry in entries.items()
        if before.find(entry) != after.find(entry)
    }


def assert_sound(path, offsets, id, offset, torn):
    """Check what a process finds that opens the index after another was killed."""
    try:
        with opened(path) as index:
            assert_never_wrong(index, offsets)
            assert ask(index, id) in (None, offset) or torn
            put(index, id, offset)
            more = [(other, 7) for other in scattered(50, seed=6)]
            for other, place in more:
                put(index, other, place)
            everything = offsets | {id: offset} | dict(more)
            assert {other: index.get(other) for other in everything} == everything
    except IndexDamaged:
        assert torn


def test_killed_while_finishing(path, mortal):
    """A process that is killed while it finishes another's split changes nothing."""
    before, offsets, id, offset = next(splits(path, mortal))

    def add():
        with opened(path) as index:
            put(index, id, offset)

    def look():
        with opened(path):
            pass

    offsets = moved(before, path.read_bytes(), offsets)
    finished = 0
    for last in itertools.count():
        path.write_bytes(before)
        if not is_killed(mortal, last, add):
            break
        half_way = path.read_bytes()
        for later in itertools.count():
            path.write_bytes(half_way)
            if not is_killed(mortal, later, look):
                break
            finished += 1
            assert_sound(path, offsets, id, offset, torn=False)
    assert finished > 3


def test_running_process_finishes_a_split(path, mortal):
    """A process that had the index open finishes the split of one that was killed."""
    before, offsets, id, offset = next(splits(path, mortal))
    offsets = moved(before, path.read_bytes(), offsets)
    for last in itertools.count():
        path.write_bytes(before)
        with opened(path) as running, opened(path) as killed:
            was_killed = is_killed(mortal, last, lambda: put(killed, id, offset))
            running.refresh()
            put(running, id, offset)
            offsets[id] = offset
            assert {other: running.get(other) for other in offsets} == offsets
        if not was_killed:
            break


# A process that is interrupted, and goes on.


def is_interrupted(last, job, *arguments):
    """Run a job that a signal ends after so many lines; return whether it did."""
    lines = itertools.count()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != id_index.__file__:
            return None
        if event == 'line' and next(lines) == last:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job(*arguments)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_interrupted_in_a_split(path, mortal):
    """A process that is interrupted anywhere in a split goes on with a sound index."""
    for before, offsets, id, offset in splits(path, mortal):
        kept = path.read_bytes()
        path.write_bytes(before)
        with opened(path) as index:
            bucket = index._bucket_of(index._hash(id))
            more = [
                other
                for other in scattered(10_000, seed=6)
                if index._bucket_of(index._hash(other)) == bucket
            ]
        expected = moved(before, kept, offsets) | dict.fromkeys(more, 7) | {id: offset}
        for last in itertools.count():
            path.write_bytes(before)
            with opened(path) as index:
                index.reserve(1)
                interrupted = is_interrupted(last, index.put, id, offset)
                for other in [*more, id]:
                    index.refresh()
                    put(index, other, expected[other])
                assert {other: index.get(other) for other in expected} == expected
            if not interrupted:
                break
        assert last > 50
        path.write_bytes(kept)


@pytest.mark.parametrize('job', [Index.refresh, lambda index: index.reserve(9000)])
def test_interrupted_in_growing(path, job):
    """A process that is interrupted while it maps the file again goes on with it."""
    fill(path, [(5, 50)])
    before = path.read_bytes()
    for last in itertools.count():
        path.write_bytes(before)
        with opened(path) as index, opened(path) as other:
            other.reserve(5000)
            for id in range(-5000, 0):
                other.put(id, 7)
            interrupted = is_interrupted(last, job, index)
            index.refresh()
            put(index, 6, 60)
            assert [index.get(id) for id in (5, 6, -1)] == [50, 60, 7]
        if not interrupted:
            break
    assert last > 5


# A full disk.


def test_reserve_on_a_full_disk(path):
    """A reserve that finds no room leaves the index unchanged and in use."""
    system = BoundedSystem()
    with opened(path, system) as index:
        for id in range(1000):
            put(index, id, id)
        text = path.read_bytes()
        system.most = 0
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            index.reserve(10_000)
        assert path.read_bytes() == text
        assert [index.get(id) for id in range(1000)] == list(range(1000))
        index.put(5, 50)
        assert index.get(5) == 50
        system.most = MOST_BYTES
        for id in range(1000, 20_000):
            put(index, id, id)
        assert index.get(19_999) == 19_999


@pytest.mark.parametrize('count', [1, 2, CAPACITY, 1000, 30_000])
def test_reserve_is_enough(path, count):
    """After a reserve for so many puts they need no further room."""
    system = BoundedSystem()
    entries = [(id, offset) for offset, id in enumerate(scattered(60_000))]
    with opened(path, system) as index:
        for at in range(0, max(2000, count), count):
            system.most = MOST_BYTES
            index.reserve(count)
            system.most = 0
            for id, offset in entries[at : at + count]:
                index.put(id, offset)
        for id, offset in entries[: at + count]:
            assert index.get(id) == offset


def test_no_holes(path):
    """The file has no holes, which a full disk would turn into a killed process."""
    fill(path, [(id, id) for id in range(20_000)])
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size


@pytest.mark.parametrize('job', ['reserve', 'refresh'])
def test_map_that_fails(path, monkeypatch, job):
    """A reserve or a refresh that cannot map the file leaves the index in use."""
    fill(path, [(5, 50)])
    with opened(path) as index, opened(path) as other:
        other.reserve(10_000)
        for id in range(-10_000, 0):
            other.put(id, 7)
        if job == 'reserve':
            index.refresh()

        def refuse(fd, size):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        def attempt():
            if job == 'reserve':
                index.reserve(20_000)
            else:
                index.refresh()

        with monkeypatch.context() as patch:
            patch.setattr(id_index.mmap, 'mmap', refuse)
            for _ in range(2):
                with pytest.raises(OSError, match='Too many open files'):
                    attempt()
        attempt()
        assert [index.get(id) for id in (5, -1, -10_000, 6)] == [50, 7, 7, None]


# Whether an index belongs to a plant file.


@pytest.fixture
def plants(tmp_path):
    """A plant file, open for reading."""
    path = tmp_path / 'plants.jsonl'
    path.write_bytes(b'{"id":1,"name":"Fern"}\n' * 50)
    with path.open('rb') as file:
        yield file


def identity(plants, boot=IDENTITY.boot):
    """Return what ties an index to a plant file."""
    status = os.fstat(plants.fileno())
    return Identity(status.st_dev, status.st_ino, boot)


def mtime(plants):
    """Return when the plant file was changed."""
    return os.fstat(plants.fileno()).st_mtime_ns


@pytest.fixture
def trusted(path, plants):
    """An index that knows the whole plant file."""
    build(path, identity(plants), [(1, 0)])
    with opened(path) as index:
        text = plants.read()
        index.advance(len(text), text)
        yield index


BOOTED = bytes(16)


def test_trust(trusted, plants):
    """An index is believed for its file, while it is open and after a clean close."""
    assert trusted.distrust(identity(plants), plants) is None
    trusted.mark_open(IDENTITY.boot)
    assert trusted.distrust(identity(plants), plants) is None
    trusted.mark_closed(mtime(plants))
    assert trusted.distrust(identity(plants), plants) is None
    assert trusted.distrust(identity(plants, BOOTED), plants) is None
    trusted.mark_open(BOOTED)
    assert trusted.distrust(identity(plants, BOOTED), plants) is None


def test_trust_with_more_plants(trusted, plants):
    """An index that is behind its file is believed as far as it knows it."""
    with open(plants.name, 'ab') as file:
        file.write(b'more')
    assert trusted.distrust(identity(plants), plants) is None


@pytest.mark.parametrize('tail', [b'', b'x', b'x' * 256, b'x' * 257, b'x' * 5000])
def test_trust_of_any_tail(path, plants, tail):
    """An index is believed by the last bytes it knows, however many there are."""
    with open(plants.name, 'wb') as file:
        file.write(tail)
    build(path, identity(plants), [])
    with opened(path) as index:
        index.advance(len(tail), tail)
        assert index.distrust(identity(plants), plants) is None
        if tail:
            with open(plants.name, 'r+b') as file:
                file.seek(-1, os.SEEK_END)
                file.write(b'y')
            assert index.distrust(identity(plants), plants) == 'it is of another file'


def other_device(index, plants):
    """Move the plant file to another device."""
    return identity(plants)._replace(device=0)


def other_inode(index, plants):
    """Replace the plant file."""
    return identity(plants)._replace(inode=0)


def other_tail(index, plants):
    """Change the last bytes of the plant file."""
    with open(plants.name, 'r+b') as file:
        file.seek(-3, os.SEEK_END)
        file.write(b'?')


def cut_short(index, plants):
    """Cut the plant file short."""
    os.truncate(plants.name, 10)


def touched(index, plants):
    """Change the plant file while the index is closed."""
    index.mark_closed(mtime(plants))
    os.utime(plants.name, ns=(0, mtime(plants) + 1))


def booted(index, plants):
    """Lose the power while the index is open."""
    return identity(plants, BOOTED)


def booted_after_reopening(index, plants):
    """Lose the power while the index is open again."""
    index.mark_closed(mtime(plants))
    index.mark_open(IDENTITY.boot)
    return identity(plants, BOOTED)


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (other_device, 'it is of another file'),
        (other_inode, 'it is of another file'),
        (other_tail, 'it is of another file'),
        (cut_short, 'the plant file was cut short'),
        (touched, 'the plant file was changed since'),
        (booted, 'it was not closed before the machine went down'),
        (booted_after_reopening, 'it was not closed before the machine went down'),
    ],
)
def test_distrust(trusted, plants, change, reason):
    """An index is not believed if it may not be that of the file, and says why."""
    changed = change(trusted, plants) or identity(plants)
    assert trusted.distrust(changed, plants) == reason


def test_retired(trusted, path):
    """A retired index is damaged for everybody who has it and for who opens it."""
    with opened(path) as other:
        trusted.retire()
        for index in (trusted, other):
            with pytest.raises(IndexDamaged):
                index.refresh()
    with pytest.raises(IndexDamaged), opened(path):
        pass


def test_marks_keep_the_entries(trusted, path):
    """What is recorded about the file changes no entry, and others see it."""
    trusted.mark_closed(5)
    with opened(path) as index:
        assert index.get(1) == 0
        assert index.end == trusted.end
