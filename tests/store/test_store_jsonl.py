"""The store in a file keeps the contract, and its file is what it should be."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from store import IdTaken
from store import Plant
from store import StoreCorrupt
from store import StoreUnavailable
from store import open_store
from store.group_commit import Entry
from store.jsonl import JSONLinesStore
from store.jsonl import file as plant_file
from store.jsonl.record import encode
from store.testing import HOSTILE
from store.testing import PATIENCE
from store.testing import StoreContract
from store.testing import in_child
from store.testing import in_threads
from store.testing import wait_until

FERN = b'{"id":1,"name":"Fern"}\n'
MOSS = b'{"id":2,"name":"Moss","tag":"shade"}\n'
PLANTS = [Plant(1, 'Fern'), Plant(2, 'Moss', 'shade')]


def index_of(path):
    """Return where the index of a plant file is."""
    return path.with_name(path.name + '.index')


def files(path):
    """Return what is in the directory of the plant file, by name."""
    return {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}


@contextlib.contextmanager
def renamed(path):
    """Take a file away, and put it back at the end of the block."""
    away = path.rename(path.with_name('away'))
    try:
        yield
    finally:
        away.rename(path)


class TestJSONLinesStore(StoreContract):
    @pytest.fixture
    def store(self, path):
        with JSONLinesStore(path) as store:
            store.ping()
            yield store

    def raw_plants(self, store):
        text = store.path.read_bytes().decode()
        assert text.endswith('\n') or not text
        return [Plant(**json.loads(line)) for line in text.split('\n')[:-1]]

    def url(self, store):
        return f'jsonl:{store.path}'

    def unavailable(self, store):
        return renamed(store.path)


class RecordingSystem:
    """The system calls, noting those that change a file and what they change."""

    NOTED = ('open', 'pwrite', 'ftruncate', 'fsync', 'fdatasync')

    def __init__(self, **replaced):
        self.calls = []
        self._replaced = replaced

    def __getattr__(self, name):
        real = self._replaced.get(name) or getattr(os, name)
        if name not in self.NOTED:
            return real

        def call(target, *arguments):
            if isinstance(target, int):
                called_on = os.readlink(f'/proc/self/fd/{target}')
            else:
                called_on = os.fspath(target)
            result = real(target, *arguments)
            self.calls.append((name, called_on))
            return result

        return call


# For the tests that add many plants one by one, and ask nothing of the disk.
UNSYNCED = RecordingSystem(fdatasync=lambda fd: None)


class TestFile:
    def test_bytes(self, path):
        """A line has its members in order, no white space, and UTF-8 as it is."""
        with JSONLinesStore(path) as store:
            for plant in (
                Plant(-7, 'Fern', 'shade'),
                Plant(2**63 - 1, 'Gräser 🌱 \u2028\ufeff\x7f/', ''),
                Plant(0, '"\\\b\f\n\r\t\x01\x1f'),
            ):
                store.add(plant)
        assert path.read_bytes() == (
            b'{"id":-7,"name":"Fern","tag":"shade"}\n'
            b'{"id":9223372036854775807,"name":"'
            + 'Gräser 🌱 \u2028\ufeff\x7f/'.encode()
            + b'","tag":""}\n'
            b'{"id":0,"name":"\\"\\\\\\b\\f\\n\\r\\t\\u0001\\u001f"}\n'
        )

    def test_making_a_store_touches_nothing(self, path):
        """A store makes no file before its first use, nor when it is just closed."""
        JSONLinesStore(path).close()
        assert not files(path)

    def test_relative_path(self, path, monkeypatch):
        """A relative path means what it meant when the store was made."""
        monkeypatch.chdir(path.parent)
        store = open_store(f'jsonl:{path.name}')
        monkeypatch.chdir('/')
        with store:
            store.add(Plant(1, 'Fern'))
        assert path.read_bytes() == FERN

    def test_mode(self, path):
        """Every file that the store makes is for its owner alone."""
        mask = os.umask(0)
        try:
            path.touch(0o600)
            path.write_bytes(FERN + b'torn')
            with JSONLinesStore(path) as store:
                store.ping()
            path.unlink()
            index_of(path).unlink()
            with JSONLinesStore(path) as store:
                store.ping()
        finally:
            os.umask(mask)
        modes = {entry.name: entry.stat().st_mode for entry in path.parent.iterdir()}
        assert set(modes) == {path.name, index_of(path).name, f'{path.name}.torn-1'}
        assert {oct(mode & 0o7777) for mode in modes.values()} == {'0o600'}

    def test_mode_of_an_old_file(self, path):
        """A file that was there keeps its mode."""
        path.touch()
        path.chmod(0o640)
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
        assert path.stat().st_mode & 0o777 == 0o640

    def test_directory_is_synced(self, path):
        """A new file's directory is synced before the first plant is written."""
        system = RecordingSystem()
        with JSONLinesStore(path, system=system) as store:
            store.add(Plant(1, 'Fern'))
        made = system.calls.index(('open', str(path)))
        synced = system.calls.index(('fsync', str(path.parent)))
        written = system.calls.index(('pwrite', str(path)))
        assert made < synced < written

    def test_directory_of_an_empty_file_is_synced(self, path):
        """An empty file's directory is synced too: its maker may have died before."""
        path.touch()
        system = RecordingSystem()
        with JSONLinesStore(path, system=system) as store:
            store.ping()
        assert ('fsync', str(path.parent)) in system.calls

    def test_add_is_synced(self, path):
        """An add returns after a write and then a sync; a repeat after a sync."""
        system = RecordingSystem()

        def calls():
            noted = [name for name, target in system.calls if target == str(path)]
            del system.calls[:]
            return noted

        with JSONLinesStore(path, system=system) as store:
            store.ping()
            calls()
            store.add(Plant(1, 'Fern'))
            assert calls() == ['pwrite', 'fdatasync']
            store.add(Plant(1, 'Fern'))
            assert calls() == ['fdatasync']
            with pytest.raises(IdTaken):
                store.add(Plant(1, 'Moss'))
            assert not calls()

    def test_opening_is_synced(self, path):
        """A store that opens syncs what others wrote: a repeat would acknowledge it."""
        path.write_bytes(FERN)
        system = RecordingSystem()
        with JSONLinesStore(path, system=system) as store:
            store.ping()
            assert ('fsync', str(path)) in system.calls

    def test_no_directory(self, path):
        """A directory is never made, and the reason says that it is missing."""
        store = JSONLinesStore(path.parent / 'none' / path.name)
        with store, pytest.raises(StoreUnavailable, match='directory does not exist'):
            store.add(Plant(1, 'Fern'))
        assert not files(path)

    def test_not_a_file(self, path):
        """What is not a file is unavailable, and the reason names no path."""
        path.mkdir()
        with JSONLinesStore(path) as store, pytest.raises(StoreUnavailable) as caught:
            store.ping()
        assert caught.value.reason == os.strerror(errno.EISDIR)
        assert str(path) in str(caught.value)

    def test_iteration_makes_no_file(self, path):
        """To iterate over a store that does not exist is an error and makes nothing."""
        with JSONLinesStore(path) as store, pytest.raises(StoreUnavailable):
            list(store)
        assert not files(path)

    def test_check_opening_changes_nothing(self, path):
        """What a start would meet is told of a store that is there or not yet."""
        with JSONLinesStore(path) as store:
            store.check_opening()
        assert not files(path)
        torn = FERN + b'{"id":2,"na'
        path.write_bytes(torn)
        with JSONLinesStore(path) as store:
            store.check_opening()
        assert files(path) == {path.name: torn}

    def test_check_opening_fails(self, path):
        """A file that cannot be opened, or made, is told without a file being made."""
        path.mkdir()
        for wrong, reason in (
            (path, 'Is a directory'),
            (path / 'no' / 'x', 'not exist'),
        ):
            with JSONLinesStore(wrong) as store:
                with pytest.raises(StoreUnavailable, match=reason):
                    store.check_opening()
                store.close()
        assert list(path.iterdir()) == []

    def test_observer(self, path):
        """Whoever observes a store is told of each sync of its adds."""
        seen = []
        with JSONLinesStore(path) as store:
            store.observe_syncs(lambda *sync: seen.append((sync[0], sync[1] > 0)))
            store.add(Plant(1, 'Fern'))
            store.add(Plant(1, 'Fern'))
            with pytest.raises(IdTaken):
                store.add(Plant(1, 'Moss'))
        assert seen == [(1, True), (1, True)]


class TestMissingFile:
    @pytest.fixture
    def forgotten(self, path):
        """A plant file that is gone while its index is there."""
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
        path.unlink()
        return path

    def test_refused(self, forgotten):
        """A missing file whose index is there is not made anew: it would forget ids."""
        with JSONLinesStore(forgotten) as store:
            for attempt in (store.ping, lambda: store.add(Plant(1, 'Moss'))):
                with pytest.raises(StoreUnavailable, match=r'remove .*\.index'):
                    attempt()
        assert not forgotten.exists()

    def test_comes_back(self, forgotten):
        """A missing file that is put back is used again by the same store."""
        with JSONLinesStore(forgotten) as store:
            with pytest.raises(StoreUnavailable):
                store.ping()
            forgotten.write_bytes(FERN)
            with pytest.raises(IdTaken):
                store.add(Plant(1, 'Moss'))

    def test_create_always(self, forgotten):
        """A missing file is made anew if that is asked for, and knows no id."""
        with open_store(f'jsonl:{forgotten}', create='always') as store:
            store.add(Plant(1, 'Moss'))
            assert list(store) == [Plant(1, 'Moss')]

    def test_create_never(self, path):
        """A missing file is not made if that is asked for, index or not."""
        with open_store(f'jsonl:{path}', create='never') as store:
            for attempt in (store.ping, lambda: store.add(Plant(1, 'Fern'))):
                with pytest.raises(StoreUnavailable, match='the file is gone'):
                    attempt()
        assert not files(path)

    @pytest.mark.parametrize('create', ['always', 'first', 'never'])
    def test_file_is_kept(self, path, create):
        """A file that is there is kept, whatever is asked for."""
        path.write_bytes(FERN)
        with JSONLinesStore(path, create=create) as store, pytest.raises(IdTaken):
            store.add(Plant(1, 'Moss'))
        assert path.read_bytes() == FERN


BY_HAND = {
    'spaces': b' { "id" : 1 , "name" : "Fern" } \n',
    'tabs': b'\t{\t"id"\t:\t1\t,\t"name"\t:\t"Fern"\t}\t\n',
    'carriage-return': b'{"id":1,"name":"Fern"}\r\n',
    'order': b'{"name":"Fern","id":1}\n',
    'more-members': b'{"$":[{}],"id":1,"x":1e999,"name":"Fern","y":{"id":2}}\n',
    'escapes': b'{"\\u0069d":1,"n\\u0061me":"F\\u0065rn"}\n',
    'minus-zero': b'{"id":-0,"name":"Fern"}\n',
}


class TestLinesByHand:
    @pytest.mark.parametrize('line', BY_HAND.values(), ids=BY_HAND)
    @pytest.mark.parametrize('open_before', [True, False], ids=['running', 'at-open'])
    def test_read(self, path, line, open_before):
        """A line that was written by hand is as good as one of ours."""
        plant = Plant(0 if b'-0' in line else 1, 'Fern')
        path.write_bytes(MOSS)
        with JSONLinesStore(path) as store:
            if open_before:
                store.ping()
            with path.open('ab') as file:
                file.write(line)
            store.add(plant)
            with pytest.raises(IdTaken):
                store.add(Plant(plant.id, 'Ivy'))
            assert sorted(store) == sorted([PLANTS[1], plant])
        assert path.read_bytes() == MOSS + line

    def test_same_plant_twice(self, path):
        """A plant that is in the file twice is accepted."""
        text = FERN + MOSS + BY_HAND['order']
        path.write_bytes(text)
        for _ in range(2):
            with JSONLinesStore(path) as store:
                store.add(Plant(1, 'Fern'))
                with pytest.raises(IdTaken):
                    store.add(Plant(1, 'Moss'))
        assert path.read_bytes() == text

    @pytest.mark.parametrize('known', [0, 1, 2, 3])
    def test_two_plants_with_one_id(self, path, known):
        """Two plants with one id are refused, however much the store knew before."""
        lines = [MOSS, FERN, b'{"id":3,"name":"Ivy"}\n', b'{"id":1,"name":"Reed"}\n']
        path.write_bytes(b''.join(lines[:known]))
        with JSONLinesStore(path) as store:
            store.ping()
            path.write_bytes(b''.join(lines))
            with pytest.raises(StoreCorrupt, match='that of a different plant') as ex:
                store.add(Plant(9, 'Oak'))
        assert (ex.value.path, ex.value.line) == (str(path), 4)
        assert ex.value.offset == sum(map(len, lines[:3]))
        assert path.read_bytes() == b''.join(lines)

    def test_two_plants_with_one_id_stay_refused(self, path):
        """Two plants with one id are refused at every start, not only at the first."""
        path.write_bytes(FERN + b'{"id":1,"name":"Reed"}\n')
        for _ in range(3):
            with JSONLinesStore(path) as store, pytest.raises(StoreCorrupt):
                store.ping()


TORN = {
    'half-a-line': b'{"id":3,"na',
    'no-line-feed': b'{"id":3,"name":"Ivy"}',
    'half-a-character': '{"id":3,"name":"🌱'.encode()[:-1],
    'zeros': bytes(5000),
    'zeros-and-a-line-feed': bytes(511) + b'\n',
    'line-feed': b'\n',
    'several-lines': b'\xff\xfe\n\n{"id":3}\n{"id":3,"name":null}\n[]\n{"id":',
    'long': b'{"id":3,"name":"' + b'x' * (5 * 2**20),
}


class TestTornTail:
    @pytest.mark.parametrize('torn', TORN.values(), ids=TORN)
    @pytest.mark.parametrize('sound', [b'', FERN + MOSS], ids=['empty', 'sound'])
    @pytest.mark.parametrize('open_before', [True, False], ids=['running', 'at-open'])
    def test_cut(self, path, caplog, torn, sound, open_before):
        """A torn tail is cut off and kept in a side file, with a warning."""
        path.write_bytes(sound)
        with JSONLinesStore(path) as store:
            if open_before:
                store.ping()
            with path.open('ab') as file:
                file.write(torn)
            store.add(Plant(7, 'Oak'))
        assert path.read_bytes() == sound + b'{"id":7,"name":"Oak"}\n'
        assert path.with_name('plants.jsonl.torn-1').read_bytes() == torn
        (warning,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
        assert f'{path}: a torn tail of {len(torn)} bytes' in warning.getMessage()
        assert f'at byte {len(sound)},' in warning.getMessage()
        assert 'plants.jsonl.torn-1' in warning.getMessage()

    def test_cut_again(self, path):
        """A second torn tail goes to another side file: nothing is overwritten."""
        for number in (1, 2, 3):
            path.write_bytes(FERN + b'torn %d' % number)
            with JSONLinesStore(path) as store:
                store.ping()
        for number in (1, 2, 3):
            side = path.with_name(f'plants.jsonl.torn-{number}')
            assert side.read_bytes() == b'torn %d' % number

    def test_kept_before_it_is_cut(self, path):
        """A torn tail is kept durably before it is cut off, and the cut is synced."""
        path.write_bytes(FERN + b'torn')
        system = RecordingSystem()
        with JSONLinesStore(path, system=system) as store:
            store.ping()
        cut = system.calls.index(('ftruncate', str(path)))
        assert ('fsync', f'{path}.torn-1') in system.calls[:cut]
        assert ('fsync', str(path.parent)) in system.calls[:cut]
        assert ('fsync', str(path)) in system.calls[cut:]

    def test_not_kept(self, path):
        """A torn tail that cannot be kept is not cut off either."""

        def full(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        path.write_bytes(FERN + b'torn')
        store = JSONLinesStore(path, system=RecordingSystem(fsync=full))
        with store, pytest.raises(StoreUnavailable, match='No space left'):
            store.ping()
        assert path.read_bytes() == FERN + b'torn'

    def test_left_out(self, path, caplog):
        """Iteration leaves a torn tail out, with a warning, and changes nothing."""
        path.write_bytes(FERN + MOSS + b'torn')
        with JSONLinesStore(path) as store:
            assert list(store) == PLANTS
        assert f'{path}: a torn tail at byte {len(FERN + MOSS)}' in caplog.text
        assert files(path) == {path.name: FERN + MOSS + b'torn'}


DAMAGE = {
    'empty-line': b'\n',
    'not-json': b'{"id":3,"name":"Ivy"\n',
    'not-utf-8': b'{"id":3,"name":"\xff"}\n',
    'zeros': bytes(4096) + b'\n',
    'no-name': b'{"id":3}\n',
    'large-id': b'{"id":9223372036854775808,"name":"Ivy"}\n',
    'nul': b'{"id":3,"name":"\\u0000"}\n',
    'surrogate': b'{"id":3,"name":"\\ud800"}\n',
    'two-lines': b'{"id":3,"name":\n"Ivy"}\n',
    'two-records': b'{"id":3,"name":"Ivy"}{"id":4,"name":"Oak"}\n',
    'byte-order-mark': b'\xef\xbb\xbf{"id":3,"name":"Ivy"}\n',
}


class TestDamage:
    @pytest.mark.parametrize('damage', DAMAGE.values(), ids=DAMAGE)
    @pytest.mark.parametrize('before', [b'', FERN], ids=['first', 'second'])
    @pytest.mark.parametrize('open_before', [True, False], ids=['running', 'at-open'])
    def test_refused(self, path, damage, before, open_before):
        """A damaged line that sound lines follow is refused, and nothing is changed."""
        path.write_bytes(before)
        with JSONLinesStore(path) as store:
            if open_before:
                store.ping()
            with path.open('ab') as file:
                file.write(damage + MOSS + b'torn')
            text = path.read_bytes()
            for _ in range(2):
                with pytest.raises(StoreCorrupt) as caught:
                    store.add(Plant(9, 'Oak'))
                error = caught.value
                line = before.count(b'\n') + 1
                assert (error.path, error.line, error.offset) == (
                    str(path),
                    line,
                    len(before),
                )
                assert f'{path}: line {line} (byte {len(before)})' in str(error)
                assert error.reason in str(error)
            iterator = iter(store)
            assert [next(iterator) for _ in range(bool(before))] == PLANTS[:1][
                : bool(before)
            ]
            with pytest.raises(StoreCorrupt) as caught:
                next(iterator)
            assert caught.value.offset == len(before)
        assert files(path).keys() <= {path.name, index_of(path).name}
        assert path.read_bytes() == text

    def test_repaired_in_place(self, path):
        """A damaged line that somebody mends in the file is read by a running store."""
        damage = DAMAGE['not-json']
        path.write_bytes(FERN)
        with JSONLinesStore(path) as store:
            store.ping()
            with path.open('ab') as file:
                file.write(damage + MOSS)
            with pytest.raises(StoreCorrupt):
                store.add(Plant(9, 'Oak'))
            with path.open('r+b') as file:
                file.write(FERN + damage.replace(b'Ivy"', b'Iv"}') + MOSS)
            store.add(Plant(9, 'Oak'))
            with pytest.raises(IdTaken):
                store.add(Plant(3, 'Reed'))


def emptied(index):
    """Leave no byte of it."""
    index.write_bytes(b'')


def shortened(index):
    """Cut it in the middle of a page."""
    os.truncate(index, 600)


def overwritten(index):
    """Put something else in its place."""
    index.write_bytes(b'plants' * 20_000)


def zeroed(index):
    """Make every byte zero."""
    index.write_bytes(bytes(index.stat().st_size))


def exchanged(index):
    """Put the index of another plant file in its place."""
    other = index.with_name('other.jsonl')
    with JSONLinesStore(other) as store:
        store.add(Plant(5, 'Other'))
    index_of(other).replace(index)


def without_buckets(index):
    """Damage every page but the first, which only a look-up notices."""
    text = index.read_bytes()
    index.write_bytes(text[:512] + bytes(len(text) - 512))


SPOILED = [Path.unlink, emptied, shortened, overwritten, zeroed, exchanged]


class TestIndex:
    @pytest.mark.parametrize(
        'spoil', [*SPOILED, without_buckets], ids=lambda function: function.__name__
    )
    def test_rebuilt(self, path, spoil):
        """An index that is missing, damaged or of another file is built again."""
        with JSONLinesStore(path) as store:
            for plant in PLANTS:
                store.add(plant)
        spoil(index_of(path))
        with JSONLinesStore(path) as store:
            for plant in PLANTS:
                with pytest.raises(IdTaken):
                    store.add(Plant(plant.id, 'Reed'))
                store.add(plant)
            store.add(Plant(3, 'Ivy'))
        assert path.read_bytes() == FERN + MOSS + b'{"id":3,"name":"Ivy"}\n'

    @pytest.mark.parametrize('open_before', [True, False], ids=['running', 'at-open'])
    def test_damaged_and_behind(self, path, open_before):
        """An index that is damaged and behind the file is built again, not believed."""
        killed = JSONLinesStore(path)
        killed.add(Plant(1, 'Fern'))
        without_buckets(index_of(path))
        with path.open('ab') as file:
            file.write(MOSS)
        try:
            store = killed if open_before else JSONLinesStore(path)
            with store, pytest.raises(IdTaken):
                store.add(Plant(2, 'Reed'))
        finally:
            killed.close()

    def test_behind(self, path):
        """What was written by a process that died before its index is caught up."""
        with JSONLinesStore(path) as killed:
            killed.add(Plant(1, 'Fern'))
            with path.open('ab') as file:
                file.write(MOSS)
            with JSONLinesStore(path) as store, pytest.raises(IdTaken):
                store.add(Plant(2, 'Reed'))
            with pytest.raises(IdTaken):
                killed.add(Plant(2, 'Reed'))

    def test_two_indexes(self, path):
        """Stores that do not share an index any more still agree on every id."""
        with JSONLinesStore(path) as one, JSONLinesStore(path) as other:
            one.add(Plant(1, 'Fern'))
            index_of(path).unlink()
            other.add(PLANTS[1])
            with pytest.raises(IdTaken):
                one.add(Plant(2, 'Reed'))
            with pytest.raises(IdTaken):
                other.add(Plant(1, 'Reed'))
            one.add(Plant(3, 'Ivy'))
            with pytest.raises(IdTaken):
                other.add(Plant(3, 'Reed'))

    def test_start_costs_the_same(self, path, caplog):
        """A start after a clean close reads no plants: the index is believed."""
        caplog.set_level(logging.INFO)
        path.write_bytes(FERN)
        for _ in range(3):
            with JSONLinesStore(path) as store:
                store.add(PLANTS[1])
        assert caplog.text.count('building the index') == 1

    def test_changed_while_closed(self, path):
        """A file that was changed by hand while it was closed is indexed again."""
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
        path.write_bytes(FERN.replace(b'1', b'8'))
        os.utime(path, ns=(1, 1))
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Reed'))
            with pytest.raises(IdTaken):
                store.add(Plant(8, 'Reed'))

    def test_rebuild_that_fails(self, path):
        """A store goes on by itself after its index could not be opened again."""
        refusing = []

        def refuse_index(name, *arguments):
            if refusing and '.index' in os.fspath(name):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return os.open(name, *arguments)

        system = RecordingSystem(open=refuse_index)
        with JSONLinesStore(path, system=system) as store:
            store.add(Plant(1, 'Fern'))
            with index_of(path).open('r+b') as file:
                file.write(bytes(512))
            refusing.append(True)
            with pytest.raises(StoreUnavailable):
                store.add(PLANTS[1])
            refusing.clear()
            store.add(PLANTS[1])
            with pytest.raises(IdTaken):
                store.add(Plant(1, 'Reed'))

    def test_large_batch(self, path):
        """A batch of plants finds room in the index, however many they are."""
        plants = [Plant(id, 'Fern') for id in range(8000)]
        with JSONLinesStore(path) as store:
            store.ping()
            batch = [Entry((plant, encode(plant)), 24) for plant in plants]
            # As if all of them had come to wait at once.
            assert store._backend()._append(batch)
            assert not any(entry.error for entry in batch)
            assert list(store) == plants
            with pytest.raises(IdTaken):
                store.add(Plant(7999, 'Reed'))


class TestThreadsAndForks:
    def test_group_commit(self, path):
        """Plants that wait together share one write and one sync."""
        held = threading.Event()
        go = threading.Event()

        def sync(fd):
            os.fdatasync(fd)
            if system.calls.count(('pwrite', str(path))) == 1:
                held.set()
                assert go.wait(PATIENCE)

        def follow(id):
            assert held.wait(PATIENCE)
            store.add(Plant(id, 'Moss'))

        def release():
            wait_until(lambda: len(store._backend()._commit._waiting) == 8)
            go.set()

        system = RecordingSystem(fdatasync=sync)
        with JSONLinesStore(path, system=system) as store:
            store.ping()
            followers = [partial(follow, id) for id in range(2, 10)]
            in_threads(lambda: store.add(Plant(1, 'Fern')), release, *followers)
        assert system.calls.count(('pwrite', str(path))) == 2
        assert path.read_bytes().count(b'\n') == 9

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    def test_fork_in_an_add(self, path):
        """A fork while a thread syncs leaves both processes a store that works."""
        syncing = threading.Event()
        go = threading.Event()

        def sync(fd):
            if path.stat().st_size:
                syncing.set()
                assert go.wait(PATIENCE)
            os.fdatasync(fd)

        with JSONLinesStore(path, system=RecordingSystem(fdatasync=sync)) as store:

            def use():
                go.set()
                store.add(PLANTS[1])
                with pytest.raises(IdTaken):
                    store.add(Plant(1, 'Reed'))

            def fork():
                assert syncing.wait(PATIENCE)
                try:
                    in_child(use)
                finally:
                    go.set()

            in_threads(lambda: store.add(Plant(1, 'Fern')), fork)
            store.add(Plant(3, 'Ivy'))
            assert [plant.id for plant in store] == [1, 2, 3]

    def test_close_waits_for_a_sync(self, path):
        """A close waits for a sync under way, whose plant is then acknowledged."""
        syncing = threading.Event()
        closed = threading.Event()

        def sync(fd):
            if path.stat().st_size:
                syncing.set()
                # A close that does not wait is over long before this gives up.
                assert not closed.wait(0.2)
            os.fdatasync(fd)

        def close():
            assert syncing.wait(PATIENCE)
            store.close()
            closed.set()

        store = JSONLinesStore(path, system=RecordingSystem(fdatasync=sync))
        in_threads(lambda: store.add(Plant(1, 'Fern')), close)
        assert path.read_bytes() == FERN

    def test_close_gives_everything_back(self, path):
        """A closed store holds no descriptor, whether it could open or not."""
        before = set(os.listdir('/proc/self/fd'))
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
        path.write_bytes(DAMAGE['zeros'] + FERN)
        with JSONLinesStore(path) as store, pytest.raises(StoreCorrupt):
            store.ping()
        path.unlink()
        with JSONLinesStore(path) as store, pytest.raises(StoreUnavailable):
            store.ping()
        assert set(os.listdir('/proc/self/fd')) == before


def test_hostile_names_in_one_file(path):
    """A file of hostile names is read line by line and as a whole to the same end."""
    plants = [Plant(id, text, text) for id, text in enumerate(HOSTILE.values())]
    with JSONLinesStore(path) as store:
        for plant in plants:
            store.add(plant)
    index_of(path).unlink()
    with JSONLinesStore(path) as store:
        for plant in plants:
            with pytest.raises(IdTaken):
                store.add(plant._replace(tag=None))
        assert list(store) == plants


def test_size_of_no_file(path):
    """A file that is missing has no plants, and is not made by asking."""
    assert JSONLinesStore(path).size_hint() == 0
    assert not path.exists()


def test_close_while_the_lock_is_lost(path, monkeypatch):
    """Closing does not wait for ever for who has the lock and will not give it back."""
    monkeypatch.setattr(plant_file, 'CLOSE_WITHIN', 0.05)
    store = JSONLinesStore(path)
    store.add(Plant(1, 'Fern'))
    with store._backend()._lock.held():
        store.close()
    with JSONLinesStore(path) as again:
        assert again.add(Plant(1, 'Fern')) is False


def test_close_while_another_process_is_stuck(path, monkeypatch):
    """Closing does not wait for ever for another process that has the lock either."""
    monkeypatch.setattr(plant_file, 'CLOSE_WITHIN', 0.05)
    store = JSONLinesStore(path)
    store.add(Plant(1, 'Fern'))
    # A lock of another description of the file is that of another process.
    with path.open('rb') as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        in_threads(store.close)
    with JSONLinesStore(path) as again:
        assert again.add(Plant(1, 'Fern')) is False
