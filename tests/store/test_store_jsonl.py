"""The file store: the contract, the bytes on disk, torn tails, damage, the index."""

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

from store import IdTaken, Plant, StoreCorrupt, StoreUnavailable, open_store
from store.group_commit import Entry
from store.jsonl import JSONLinesStore
from store.jsonl import file as plant_file
from store.jsonl.record import encode
from store.testing import (
    HOSTILE,
    PATIENCE,
    StoreContract,
    in_child,
    in_threads,
    wait_until,
)

FERN = b'{"id":1,"name":"Fern"}\n'
MOSS = b'{"id":2,"name":"Moss","tag":"shade"}\n'
PLANTS = [Plant(1, 'Fern'), Plant(2, 'Moss', 'shade')]


def index_of(path):
    """Return the path of the index of a plant file."""
    return path.with_name(path.name + '.index')


def files(path):
    """Return the files in the directory of the plant file: content by name."""
    return {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}


@contextlib.contextmanager
def renamed(path):
    """Rename a file, and rename it back at the end of the block."""
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
    """System calls; those that change a file are recorded, with its path."""

    RECORDED = ('open', 'pwrite', 'ftruncate', 'fsync', 'fdatasync')

    def __init__(self, **replaced):
        self.calls = []
        self._replaced = replaced

    def __getattr__(self, name):
        real = self._replaced.get(name) or getattr(os, name)
        if name not in self.RECORDED:
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


class TestFile:
    def test_bytes_of_a_line(self, path):
        """A line has its members in order, no white space, and unescaped UTF-8."""
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

    def test_unused_store_makes_no_file(self, path):
        """A store makes no file before its first use, nor when it is closed unused."""
        JSONLinesStore(path).close()
        assert not files(path)

    def test_relative_path_is_resolved_at_once(self, path, monkeypatch):
        """A relative path refers to the working directory at the call of open_store."""
        monkeypatch.chdir(path.parent)
        store = open_store(f'jsonl:{path.name}')
        monkeypatch.chdir('/')
        with store:
            store.add(Plant(1, 'Fern'))
        assert path.read_bytes() == FERN

    def test_new_files_are_private(self, path):
        """Only the owner can read or write the files that the store makes."""
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

    def test_existing_file_keeps_its_mode(self, path):
        """A plant file that exists keeps its mode."""
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
        """An empty file's directory is synced too: its maker may have been killed."""
        path.touch()
        system = RecordingSystem()
        with JSONLinesStore(path, system=system) as store:
            store.ping()
        assert ('fsync', str(path.parent)) in system.calls

    def test_add_is_synced(self, path):
        """An add returns after a write and then a sync; a repeat after a sync."""
        system = RecordingSystem()

        def calls():
            names = [name for name, target in system.calls if target == str(path)]
            del system.calls[:]
            return names

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

    def test_open_syncs_the_file(self, path):
        """An open syncs the lines of others, since a repeat would acknowledge them."""
        path.write_bytes(FERN)
        system = RecordingSystem()
        with JSONLinesStore(path, system=system) as store:
            store.ping()
            assert ('fsync', str(path)) in system.calls

    def test_missing_directory_is_not_made(self, path):
        """A missing directory is not made, and the reason says that it is missing."""
        store = JSONLinesStore(path.parent / 'none' / path.name)
        with store, pytest.raises(StoreUnavailable, match='directory does not exist'):
            store.add(Plant(1, 'Fern'))
        assert not files(path)

    def test_directory_is_unavailable(self, path):
        """A directory is unavailable as a store, and the reason names no path."""
        path.mkdir()
        with JSONLinesStore(path) as store, pytest.raises(StoreUnavailable) as caught:
            store.ping()
        assert caught.value.reason == os.strerror(errno.EISDIR)
        assert str(path) in str(caught.value)

    def test_iteration_makes_no_file(self, path):
        """Iterating over a store without a file is an error, and makes no file."""
        with JSONLinesStore(path) as store, pytest.raises(StoreUnavailable):
            list(store)
        assert not files(path)

    def test_check_opening_changes_nothing(self, path):
        """check_opening accepts a missing file or a torn tail, and changes nothing."""
        with JSONLinesStore(path) as store:
            store.check_opening()
        assert not files(path)
        torn = FERN + b'{"id":2,"na'
        path.write_bytes(torn)
        with JSONLinesStore(path) as store:
            store.check_opening()
        assert files(path) == {path.name: torn}

    def test_check_opening_makes_no_file(self, path):
        """check_opening reports a file that cannot be opened or made; it makes none."""
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

    def test_observer_learns_of_each_sync(self, path):
        """An observer of the store is called for each sync of its adds."""
        seen = []
        with JSONLinesStore(path) as store:
            store.on_sync = lambda *sync: seen.append((sync[0], sync[1] > 0))
            store.add(Plant(1, 'Fern'))
            store.add(Plant(1, 'Fern'))
            with pytest.raises(IdTaken):
                store.add(Plant(1, 'Moss'))
        assert seen == [(1, True), (1, True)]


class TestMissingFile:
    @pytest.fixture
    def forgotten(self, path):
        """A plant file that is missing while its index exists."""
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
        path.unlink()
        return path

    def test_missing_file_is_not_made_again(self, forgotten):
        """A missing file with an index is not made again: it would forget ids."""
        with JSONLinesStore(forgotten) as store:
            for attempt in (store.ping, lambda: store.add(Plant(1, 'Moss'))):
                with pytest.raises(StoreUnavailable, match=r'remove .*\.index'):
                    attempt()
        assert not forgotten.exists()

    def test_restored_file_is_used(self, forgotten):
        """A missing file that is restored is used by the same store."""
        with JSONLinesStore(forgotten) as store:
            with pytest.raises(StoreUnavailable):
                store.ping()
            forgotten.write_bytes(FERN)
            with pytest.raises(IdTaken):
                store.add(Plant(1, 'Moss'))

    def test_create_always_makes_a_missing_file(self, forgotten):
        """With ``create='always'`` a missing file is made again, without ids."""
        with open_store(f'jsonl:{forgotten}', create='always') as store:
            store.add(Plant(1, 'Moss'))
            assert list(store) == [Plant(1, 'Moss')]

    def test_create_never_makes_no_file(self, path):
        """With ``create='never'`` a missing file is an error, and is not made."""
        with open_store(f'jsonl:{path}', create='never') as store:
            for attempt in (store.ping, lambda: store.add(Plant(1, 'Fern'))):
                with pytest.raises(StoreUnavailable, match='the file is gone'):
                    attempt()
        assert not files(path)

    @pytest.mark.parametrize('create', ['always', 'first', 'never'])
    def test_existing_file_is_kept(self, path, create):
        """A file that exists is kept, whatever ``create`` says."""
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
    def test_line_written_by_hand_is_read(self, path, line, open_before):
        """A valid line that was written by hand is read like one of the store."""
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

    def test_same_plant_twice_is_accepted(self, path):
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
    def test_two_plants_with_one_id_are_refused(self, path, known):
        """Two plants with one id are damage, however many lines were known before."""
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
        """Two plants with one id are refused at every open, not only at the first."""
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
    def test_torn_tail_is_cut_off(self, path, caplog, torn, sound, open_before):
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

    def test_each_torn_tail_has_its_own_side_file(self, path):
        """A second torn tail goes to another side file: nothing is overwritten."""
        for number in (1, 2, 3):
            path.write_bytes(FERN + b'torn %d' % number)
            with JSONLinesStore(path) as store:
                store.ping()
        for number in (1, 2, 3):
            side = path.with_name(f'plants.jsonl.torn-{number}')
            assert side.read_bytes() == b'torn %d' % number

    def test_side_file_is_synced_before_the_cut(self, path):
        """The side file is durable before the tail is cut off; the cut is synced."""
        path.write_bytes(FERN + b'torn')
        system = RecordingSystem()
        with JSONLinesStore(path, system=system) as store:
            store.ping()
        cut = system.calls.index(('ftruncate', str(path)))
        assert ('fsync', f'{path}.torn-1') in system.calls[:cut]
        assert ('fsync', str(path.parent)) in system.calls[:cut]
        assert ('fsync', str(path)) in system.calls[cut:]

    def test_tail_stays_if_it_cannot_be_kept(self, path):
        """A torn tail that cannot be copied to a side file is not cut off."""

        def full(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        path.write_bytes(FERN + b'torn')
        store = JSONLinesStore(path, system=RecordingSystem(fsync=full))
        with store, pytest.raises(StoreUnavailable, match='No space left'):
            store.ping()
        assert path.read_bytes() == FERN + b'torn'

    def test_iteration_skips_a_torn_tail(self, path, caplog):
        """Iteration skips a torn tail, with a warning, and changes nothing."""
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
    def test_damage_is_refused(self, path, damage, before, open_before):
        """A damaged line before a sound one is refused, and nothing is changed."""
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

    def test_line_repaired_in_place_is_read(self, path):
        """A damaged line that is corrected in the file is read by an open store."""
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
    """Make the index empty."""
    index.write_bytes(b'')


def shortened(index):
    """Cut the index in the middle of a page."""
    os.truncate(index, 600)


def overwritten(index):
    """Overwrite the index with other bytes."""
    index.write_bytes(b'plants' * 20_000)


def zeroed(index):
    """Make every byte of the index zero."""
    index.write_bytes(bytes(index.stat().st_size))


def exchanged(index):
    """Replace the index by that of another plant file."""
    other = index.with_name('other.jsonl')
    with JSONLinesStore(other) as store:
        store.add(Plant(5, 'Other'))
    index_of(other).replace(index)


def zeroed_after_the_first_sector(index):
    """Zero all but the first 512 bytes."""
    text = index.read_bytes()
    index.write_bytes(text[:512] + bytes(len(text) - 512))


SPOILED = [Path.unlink, emptied, shortened, overwritten, zeroed, exchanged]


class TestIndex:
    @pytest.mark.parametrize(
        'spoil',
        [*SPOILED, zeroed_after_the_first_sector],
        ids=lambda function: function.__name__,
    )
    def test_spoiled_index_is_built_again(self, path, spoil):
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
    def test_damaged_index_that_is_behind_is_built_again(self, path, open_before):
        """An index that is damaged and behind the file is built again."""
        killed = JSONLinesStore(path)
        killed.add(Plant(1, 'Fern'))
        zeroed_after_the_first_sector(index_of(path))
        with path.open('ab') as file:
            file.write(MOSS)
        try:
            store = killed if open_before else JSONLinesStore(path)
            with store, pytest.raises(IdTaken):
                store.add(Plant(2, 'Reed'))
        finally:
            killed.close()

    def test_index_that_is_behind_catches_up(self, path):
        """A line of a process that was killed before it updated the index is found."""
        with JSONLinesStore(path) as killed:
            killed.add(Plant(1, 'Fern'))
            with path.open('ab') as file:
                file.write(MOSS)
            with JSONLinesStore(path) as store, pytest.raises(IdTaken):
                store.add(Plant(2, 'Reed'))
            with pytest.raises(IdTaken):
                killed.add(Plant(2, 'Reed'))

    def test_stores_agree_after_the_index_is_removed(self, path):
        """Stores that no longer share an index still agree on every id."""
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

    def test_sound_index_is_not_built_again(self, path, caplog):
        """An open after a clean close uses the index, and reads no plants."""
        caplog.set_level(logging.INFO)
        path.write_bytes(FERN)
        for _ in range(3):
            with JSONLinesStore(path) as store:
                store.add(PLANTS[1])
        assert caplog.text.count('building the index') == 1

    def test_file_changed_while_closed_is_indexed_again(self, path):
        """A file that was edited while it was closed is indexed again."""
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
        path.write_bytes(FERN.replace(b'1', b'8'))
        os.utime(path, ns=(1, 1))
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Reed'))
            with pytest.raises(IdTaken):
                store.add(Plant(8, 'Reed'))

    def test_store_recovers_from_a_failed_rebuild(self, path):
        """After a failed rebuild of the index the next add tries again."""
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

    def test_index_takes_a_large_batch(self, path):
        """The index takes a batch of 8,000 plants."""
        plants = [Plant(id, 'Fern') for id in range(8000)]
        with JSONLinesStore(path) as store:
            store.ping()
            batch = [Entry((plant, encode(plant)), 24) for plant in plants]
            # As if all of them had waited together.
            assert store._backend()._append(batch)
            assert not any(entry.error for entry in batch)
            assert list(store) == plants
            with pytest.raises(IdTaken):
                store.add(Plant(7999, 'Reed'))


class TestThreadsAndForks:
    def test_waiting_adds_share_a_write_and_a_sync(self, path):
        """Adds that wait together share one write and one sync."""
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
    def test_fork_during_a_sync(self, path):
        """After a fork while a thread syncs, the store works in both processes."""
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

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    def test_fork_while_a_thread_notes_a_sync(self, path):
        """A child that was forked while a thread used the index does not hang."""
        with JSONLinesStore(path) as store:
            store.add(Plant(1, 'Fern'))
            with store._backend()._index._guard:
                in_child(lambda: store.add(PLANTS[1]))
            assert [plant.id for plant in store] == [1, 2]

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    def test_failed_write_of_a_process_is_known_to_all(self, path):
        """No worker is ready while writes of another one fail, also if that ended."""
        quota = path.with_name('quota')

        def pwrite(fd, data, offset):
            if quota.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return os.pwrite(fd, data, offset)

        with JSONLinesStore(path, system=RecordingSystem(pwrite=pwrite)) as store:

            def fail():
                with pytest.raises(StoreUnavailable):
                    store.add(PLANTS[1])

            store.add(PLANTS[0])
            quota.touch()
            in_child(fail)
            with pytest.raises(StoreUnavailable):
                store.ping()
            quota.unlink()
            in_child(store.ping)
            quota.touch()
            store.ping()  # no write has failed since
            assert path.read_bytes() == FERN

    def test_close_waits_for_a_sync(self, path):
        """A close waits for a sync in flight, whose plant is then acknowledged."""
        # A close that did not wait would end long before this timeout.
        close_during_sync(path, lambda closed: not closed.wait(0.2))

    def test_close_leaves_no_descriptor(self, path):
        """A closed store holds no descriptor, whether its open succeeded or not."""
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
    """Iteration and a new index find the same plants in a file of hostile names."""
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


def test_close_while_a_thread_keeps_the_lock(path, monkeypatch):
    """A close waits only for a limited time for a thread that keeps the lock."""
    monkeypatch.setattr(plant_file, 'CLOSE_WITHIN', 0.05)
    store = JSONLinesStore(path)
    store.add(Plant(1, 'Fern'))
    with store._backend()._lock.held():
        store.close()
    with JSONLinesStore(path) as again:
        assert again.add(Plant(1, 'Fern')) is False


def test_close_while_another_process_keeps_the_lock(path, monkeypatch):
    """A close waits only for a limited time for a process that keeps the lock."""
    monkeypatch.setattr(plant_file, 'CLOSE_WITHIN', 0.05)
    store = JSONLinesStore(path)
    store.add(Plant(1, 'Fern'))
    # To the kernel, a lock through another open() is that of another process.
    with path.open('rb') as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        in_threads(store.close)
    with JSONLinesStore(path) as again:
        assert again.add(Plant(1, 'Fern')) is False


def test_close_while_a_sync_is_stuck(path, monkeypatch):
    """A close waits only for a limited time for a disk that does not answer."""
    monkeypatch.setattr(plant_file, 'CLOSE_WITHIN', 0.05)
    close_during_sync(path, lambda closed: closed.wait(PATIENCE))


def close_during_sync(path, is_right):
    """Close a store while it syncs a plant, which must be stored.

    The sync waits for ``is_right``, which gets the event that the close has ended.
    """
    syncing = threading.Event()
    closed = threading.Event()

    def sync(fd):
        if path.stat().st_size:
            syncing.set()
            assert is_right(closed)
        os.fdatasync(fd)

    def close():
        assert syncing.wait(PATIENCE)
        store.close()
        closed.set()

    store = JSONLinesStore(path, system=RecordingSystem(fdatasync=sync))
    in_threads(lambda: store.add(Plant(1, 'Fern')), close)
    assert path.read_bytes() == FERN
