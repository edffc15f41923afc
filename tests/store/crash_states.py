"""Generate every disk state that a crash may leave during a short scenario.

A recorder replaces the functions of ``os`` that change files. After each call it notes
the content of each file of one directory. What a crash may leave of that, four rules
say: see "How crashes are tested" in ``docs/developing.md``. The one about the table is
what SQLite documents for ``synchronous=NORMAL`` (sqlite.org/pragma.html). Another table
that was put in its place is there when the directory is synced.

So a state is one *choice* for each *question*: each block, each size, the mtime of each
file, each change to the directory, and the table. Choice 0 is what the processes saw.
"""

import functools
import itertools
import math
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self
from unittest import mock

from disk import path_of

from store import Plant, PlantStore

CHANGES = (
    *('link', 'open', 'remove', 'rename', 'replace', 'truncate', 'unlink'),
    *('ftruncate', 'posix_fallocate', 'pwrite', 'write'),
)
SYNCS = 'fdatasync', 'fsync'
UNSEEN = 'a write that bypassed os'
# What follows the plant file's name in the names of the index files, and of the table.
INDEX = '.index'
TABLE = '', '-journal', '-new', '-shm', '-wal'
LEAVE_WAL = 'PRAGMA journal_mode = DELETE'

Question = tuple[str | int, ...]
Choices = dict[Question, int]

# The real functions, also while a recorder replaces them.
_link, _open, _connect = os.link, os.open, sqlite3.connect


class Change(NamedTuple):
    """A change to the directory."""

    moment: int
    names: dict[str, int | None]  # to the number of its file from then on, if any


class Version(NamedTuple):
    """The content and the mtime of a file from some moment on."""

    moment: int
    content: bytes | None  # None if there is no such file
    mtime: int = 0  # in nanoseconds


class History:
    """The versions of a file, or of the table, and which of them are durable."""

    def __init__(self, first: Version) -> None:
        self.versions = [first]  # and one after each change
        # For each sync the moment of its end, and the number of the version it covers.
        self.synced = [(0, 0)]

    @property
    def last(self) -> int:
        """The number of the latest version."""
        return len(self.versions) - 1

    def possible(self, moment: int) -> list[Version]:
        """Return the versions of which a crash may leave parts, the newest first."""
        until = [version for version in self.versions if version.moment <= moment]
        return until[max(at for ended, at in self.synced if ended <= moment) :][::-1]


class File(History):
    """The history of a file; with a ``link``, each state has its inode, too."""

    def __init__(self, path: Path, link: Path | None) -> None:
        super().__init__(Version(0, b''))
        self.link = link
        if link is not None:
            _link(path, link)
        # Keep it open, so that the inode number is not used again.
        self.fd = _open(path, os.O_RDONLY | os.O_CLOEXEC)

    def note_version(self, moment: int) -> bool:
        """Note the file as it is now; return whether it has changed."""
        status = os.fstat(self.fd)
        content = os.pread(self.fd, status.st_size, 0)
        version = Version(moment, content, status.st_mtime_ns)
        if version[1:] == self.versions[-1][1:]:
            return False
        self.versions.append(version)
        return True


class Recorder:
    """Records the changes to the files of a directory, and the promised plants."""

    def __init__(self, directory: Path, links: Path) -> None:
        self.directory = directory
        self.path = directory / 'plants.jsonl'
        self.index = directory / f'plants.jsonl{INDEX}'
        self.files: list[File] = []
        self.changes: list[Change] = []
        # For each sync of the directory the moment of its end, and the numbers of the
        # changes that it covers.
        self.directory_syncs: list[tuple[int, set[int]]] = []
        self.calls = ['begin']  # what happened at each moment
        self.begun = 0  # the first moment at which there may be a crash
        self.sent: dict[Plant, int] = {}  # the moment of each plant
        self.acknowledged: dict[Plant, int] = {}  # the moment of each plant
        self.damage = b''  # with which a person has damaged the plant file, if any
        self.kept = 0, b''  # a moment, and what some file must hold from then on
        self.table = History(Version(0, None))
        # Called when a sync has begun, before the real call.
        self.before_sync: Callable[[], object] | None = None
        self._links = links  # the directory of a second name of each file
        self._table_names = [f'{self.index.name}{suffix}' for suffix in TABLE]
        self._table_inode: int | None = None
        self._installed = 0  # the version of the table that was last put in place
        self._draft_is_synced = True
        self._mutex = threading.RLock()
        self._numbers: dict[int, int] = {}  # from an inode to the number of its file
        self._names: dict[str, int] = {}

    @property
    def now(self) -> int:
        """The last moment."""
        return len(self.calls) - 1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens in the block; earlier changes are durable."""
        self.settle()
        self.begun = self.now
        functions = {name: self._change(name) for name in CHANGES}
        functions |= {name: self._sync(name) for name in SYNCS}
        try:
            with (
                mock.patch.multiple(os, **functions),
                mock.patch.object(sqlite3, 'connect', self._connect),
            ):
                yield
        finally:
            for file in self.files:
                os.close(file.fd)

    def send(self, *plants: Plant) -> None:
        """Note that plants are sent."""
        for plant in plants:
            self.sent.setdefault(plant, self.now)

    def add(self, store: PlantStore, *plants: Plant) -> None:
        """Add plants in one batch, and note that they are acknowledged."""
        self.send(*plants)
        outcomes = store.add_many(plants)
        assert all(isinstance(new, bool) for new in outcomes), outcomes
        self.note(f'{len(plants)} acknowledged')
        for plant in plants:
            self.acknowledged.setdefault(plant, self.now)

    def append(self, data: bytes) -> None:
        """Append to the plant file, as a process that is killed before its sync."""
        with self.path.open('ab') as file:
            file.write(data)
        self.note('a process appended and was killed')

    def keep(self, data: bytes) -> None:
        """Make the end of the plant file durable; it must not vanish from now on."""
        self.settle()
        self.kept = self.now, data

    def settle(self) -> None:
        """Make everything durable, as the kernel does after some time."""
        self.note('everything is durable')
        for history in *self.files, self.table:
            history.synced.append((self.now, history.last))
        self.directory_syncs.append((self.now, set(range(len(self.changes)))))

    def is_index(self, names: Iterable[str]) -> bool:
        """Return whether all these names are of index files."""
        return all(name.startswith(self.path.name + INDEX) for name in names)

    def note_statement(self, connection: sqlite3.Connection, sql: str) -> None:
        """Note what a statement of SQLite has made durable, or may be undone."""
        database = sqlite3.Connection.execute(connection, 'PRAGMA database_list')
        path = Path(database.fetchone()[2])
        with self._mutex:
            if sql == 'COMMIT' and path.suffix == INDEX:
                self.note('commit')
                self.table.versions.append(Version(self.now, connection.serialize()))
            elif sql == 'COMMIT':
                mode = sqlite3.Connection.execute(connection, 'PRAGMA synchronous')
                self._draft_is_synced = mode.fetchone() != (0,)
            elif sql == LEAVE_WAL:
                wal = path.with_name(f'{path.name}-wal')
                is_complete = not wal.exists() or not wal.stat().st_size
                if is_complete and self.table.synced[-1][1] >= self._installed:
                    self.note('checkpoint')
                    self.table.synced.append((self.now, self.table.last))

    def note(self, call: str) -> None:
        """Note an event, whether or not it has changed a file."""
        with self._mutex:
            self._note_changes()
            self.calls.append(call)

    def _connect(self, *arguments: Any, **options: Any) -> sqlite3.Connection:
        """Connect to a database, and note what is committed."""
        recorder = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
                cursor = super().execute(sql, *parameters)
                recorder.note_statement(self, sql)
                return cursor

        return _connect(*arguments, factory=Connection, **options)

    def _change(self, name: str) -> Callable[..., Any]:
        """Return a function of ``os`` that changes files, and notes the changes."""
        function = getattr(os, name)

        def change(target: Any, *arguments: Any, **options: Any) -> Any:
            self._note_changes()
            try:
                return function(target, *arguments, **options)
            finally:
                self._note_changes(f'{name} {path_of(target)}')

        return change

    def _sync(self, name: str) -> Callable[[int], None]:
        """Return a function of ``os`` that syncs, and notes what the sync covers."""
        function = getattr(os, name)

        def sync(fd: int) -> None:
            self.note(f'{name} {path_of(fd)} begins')
            number = self._numbers.get(os.fstat(fd).st_ino)
            version = self.files[number].last if number is not None else 0
            changes, installed = set(range(len(self.changes))), self._installed
            if self.before_sync is not None:
                self.before_sync()
            function(fd)
            self.note(f'{name} {path_of(fd)} has ended')
            if number is not None:
                self.files[number].synced.append((self.now, version))
            elif os.path.samestat(os.fstat(fd), self.directory.stat()):
                self.directory_syncs.append((self.now, changes))
                self.table.synced.append((self.now, installed))

        return sync

    def _note_changes(self, call: str = UNSEEN) -> None:
        """Note what has changed since the last time, if anything has."""
        with self._mutex:
            moment = len(self.calls)
            before, self._names = self._names, {}
            table = None
            for entry in os.scandir(self.directory):
                if entry.name == self._table_names[0]:
                    table = entry.inode()
                if entry.name in self._table_names:
                    continue
                number = self._numbers.setdefault(entry.inode(), len(self.files))
                if number == len(self.files):
                    is_index = self.is_index([entry.name])
                    link = None if is_index else self._links / f'{number}'
                    self.files.append(File(Path(entry.path), link))
                self._names[entry.name] = number
            changes = list(_changes(moment, before, self._names))
            changed = [file for file in self.files if file.note_version(moment)]
            if table != self._table_inode:
                assert self._draft_is_synced, 'a table was put in place without a sync'
                self._table_inode = table
                content = None if table is None else self.index.read_bytes()
                self.table.versions.append(Version(moment, content))
                self._installed = self.table.last
            if changes or changed or self.table.versions[-1].moment == moment:
                self.changes += changes
                self.calls.append(call)


def _changes(
    moment: int, before: dict[str, int], after: dict[str, int]
) -> Iterator[Change]:
    """Yield what has changed in a directory, a rename as one change."""
    gone = {number: name for name, number in before.items() if name not in after}
    for name, number in after.items():
        if before.get(name) != number:
            renamed = gone.pop(number, None)
            moved = {} if renamed is None else {renamed: None}
            yield Change(moment, {name: number, **moved})
    for name in gone.values():
        yield Change(moment, {name: None})


class State(NamedTuple):
    """A state of the directory that a crash may leave."""

    crash: 'Crash'
    choices: Choices  # that are not 0
    files: dict[str, tuple[Path | None, bytes, int]]  # second name, content and mtime

    def place(self) -> None:
        """Replace the content of the directory by this state."""
        recorder = self.crash.recorder
        for entry in os.scandir(recorder.directory):
            os.unlink(entry.path)
        for name, (link, content, mtime) in self.files.items():
            path = f'{recorder.directory}/{name}'
            if link is not None:
                os.link(link, path)
            with open(path, 'wb') as file:
                file.write(content)
            os.utime(path, ns=(mtime, mtime))

    def smallest(self, fails: Callable[[Self], object]) -> Self:
        """Return a failing state with as few choices as this failure needs."""
        for left_out in self.choices:
            fewer = {key: n for key, n in self.choices.items() if key != left_out}
            state = self.crash.state(fewer)
            if fails(state):
                return state.smallest(fails)
        return self

    def __str__(self) -> str:
        recorder, moment = self.crash.recorder, self.crash.moment
        calls = ''.join(f'  {call}\n' for call in recorder.calls[: moment + 1])
        lost = [f'  {self.crash.describe(*item)}\n' for item in self.choices.items()]
        return f'After\n{calls}the disk has the newest of all but\n{"".join(lost)}'


class Crash:
    """A crash at one moment of a scenario, on a disk that writes blocks of bytes."""

    def __init__(self, recorder: Recorder, moment: int, block: int) -> None:
        self.recorder = recorder
        self.moment = moment
        self.block = block
        self.questions: Choices = {}  # the number of choices for each question
        self._changes = [item for item in recorder.changes if item.moment <= moment]
        self._names: dict[int, set[str]] = {}  # that each file may have after it
        self._times: dict[int, list[int]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._blocks: dict[int, list[list[bytes]]] = {}
        syncs = recorder.directory_syncs
        synced = set().union(*(covered for ended, covered in syncs if ended <= moment))
        for at, change in enumerate(self._changes):
            if at not in synced:
                self.questions['directory', at] = 2
            for name, number in change.names.items():
                if at in synced:  # no earlier file of this name can have it now
                    for names in self._names.values():
                        names.discard(name)
                if number is not None:
                    self._names.setdefault(number, set()).add(name)
        self._names = {number: names for number, names in self._names.items() if names}
        for number in self._names:
            versions = recorder.files[number].possible(moment)
            contents = [version.content or b'' for version in versions]
            sizes = dict.fromkeys(map(len, contents))
            offsets = range(0, max(sizes), block)
            blocks = [_versions(contents, offset, block) for offset in offsets]
            sizes |= dict.fromkeys(at for at in offsets if at > min(sizes))
            self._times[number] = list(dict.fromkeys(one.mtime for one in versions))
            self._sizes[number], self._blocks[number] = list(sizes), blocks
            self.questions['mtime', number] = len(self._times[number])
            self.questions['size', number] = len(sizes)
            for at, kinds in enumerate(blocks):
                self.questions['block', number, at] = len(kinds)
        tables = recorder.table.possible(moment)
        self._tables = list(dict.fromkeys(table.content for table in tables))
        self.questions['table',] = len(self._tables)
        self.questions = {key: n for key, n in self.questions.items() if n > 1}
        self._of_index = list(filter(self._is_about_index, self.questions))
        self._of_plants = [key for key in self.questions if key not in self._of_index]

    def state(self, choices: Choices) -> State:
        """Return the state with these choices; all others are 0."""
        choices = {key: choice for key, choice in choices.items() if choice}
        names: dict[str, int | None] = {}
        for at, change in enumerate(self._changes):
            if ('directory', at) not in choices:
                names |= change.names
        files = {}
        for name, number in names.items():
            if number is not None:
                size = self._sizes[number][choices.get(('size', number), 0)]
                content = b''.join(
                    versions[choices.get(('block', number, at), 0)]
                    for at, versions in enumerate(self._blocks[number])
                )
                mtime = self._times[number][choices.get(('mtime', number), 0)]
                files[name] = self.recorder.files[number].link, content[:size], mtime
        table = self._tables[choices.get(('table',), 0)]
        if table is not None:
            for suffix, content in _in_use(table).items():
                files[f'{self.recorder.index.name}{suffix}'] = None, content, 0
        return State(self, choices, files)

    def all_states(self, chance: Random, mixtures: int) -> Iterator[State]:
        """Yield every state of the plant file, each with some states of the index."""
        counts = [self.questions[key] for key in self._of_plants]
        oldest = {key: self.questions[key] - 1 for key in self._of_index}
        mixtures = max(mixtures, 20 // math.prod(counts))
        for numbers in itertools.product(*map(range, counts)):
            choices = dict(zip(self._of_plants, numbers, strict=True))
            yield self.state(choices)
            if self._of_index:
                yield self.state(choices | oldest)
                for _ in range(mixtures):
                    yield self.state(choices | self._mixture(self._of_index, chance))

    def random_state(self, chance: Random) -> State:
        """Return a random state."""
        index = self._mixture(self._of_index, chance)
        return self.state(index | self._mixture(self._of_plants, chance))

    def describe(self, question: Question, choice: int) -> str:
        """Say which choice was taken for which part of which file."""
        kind, *number = question
        what = self._changes[number[0]] if kind == 'directory' else number
        names = self._names.get(number[0]) if kind in ('size', 'block', 'mtime') else ''
        return f'{kind} {what} {names}: {choice} (blocks of {self.block} bytes)'

    def _is_about_index(self, question: Question) -> bool:
        kind, *number = question
        if kind == 'directory':
            return self.recorder.is_index(self._changes[number[0]].names)
        # Only the index depends on times, also on those of the plant file.
        is_time = kind in ('table', 'mtime')
        return is_time or self.recorder.is_index(self._names[number[0]])

    def _mixture(self, questions: Iterable[Question], chance: Random) -> Choices:
        # All new, mostly new, half old, mostly old, all old: with equal chance.
        old = chance.choice([0, 0.1, 0.5, 0.9, 1])
        return {
            question: chance.randrange(1, self.questions[question])
            for question in questions
            if chance.random() < old
        }


def _versions(contents: list[bytes], offset: int, block: int) -> list[bytes]:
    """Return what a block may hold, the newest first."""
    blocks = [content[offset : offset + block] for content in contents]
    return list(dict.fromkeys(content.ljust(block, b'\0') for content in blocks))


@functools.cache
def _in_use(table: bytes) -> dict[str, bytes]:
    """Return the files of a table; of one that was in use, also a WAL of one commit."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, INDEX)
        path.write_bytes(table)
        uri = path.as_uri()
        with closing(_connect(f'{uri}?mode=ro', uri=True)) as last:
            if last.execute('SELECT mtime FROM state').fetchone() != (None,):
                return {'': table}
            with closing(_connect(f'{uri}?mode=rw', uri=True)) as connection:
                connection.execute('PRAGMA journal_mode = WAL')
                [number] = connection.execute('PRAGMA user_version').fetchone()
                connection.execute(f'PRAGMA user_version = {number + 1}')
                last.execute('SELECT mtime FROM state').fetchone()  # it keeps the WAL
        return {
            file.name.removeprefix(INDEX): file.read_bytes()
            for file in Path(directory).iterdir()
        }
