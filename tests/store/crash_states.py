"""Every state of the disk that a crash may leave, of a short scenario.

A recorder stands in the place of the functions of ``os`` that change files. It keeps
what each file of one directory held after each call, so it sees also what was written
past those functions, into a map of memory or by SQLite. What a crash may leave at any
moment follows from three rules:

* A block of a file is as it was when the last sync of the file began, or as it was at
  any moment since. If the file was shorter at one of them, the block may be zeros.
* The file is as long as it was at any of these moments, or some whole blocks between,
  whatever became of its blocks.
* Of the changes to the directory since its last sync, any may be lost. A rename is one
  change.
* The times of a file are as they were at the last sync that covered them, or later.
  ``fdatasync`` covers them if the size has changed.

So a state is a *choice* for each block, size, time and change to the directory. Choice
0 is what the processes saw.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from typing import NamedTuple
from unittest import mock

from store import Plant
from store import PlantStore

BY_PATH = 'link', 'open', 'remove', 'rename', 'replace', 'truncate', 'unlink'
BY_DESCRIPTOR = 'ftruncate', 'posix_fallocate', 'pwrite', 'write'
SYNCS = 'fdatasync', 'fsync'
TIMES = [f'st_{kind}time{unit}' for kind in 'amc' for unit in ('', '_ns')]
UNSEEN = 'something was written past os'
INDEX = '.index'  # what follows the name of the plant file in the names of the index

Question = tuple[str | int, ...]
Choices = dict[Question, int]

# As they are while no recorder stands in their place.
_link, _open = os.link, os.open


class Change(NamedTuple):
    """A change to the directory.

    Attributes:
        moment: When.
        names: The number of the file that each name has from then on, or ``None``.
    """

    moment: int
    names: dict[str, int | None]


class Version(NamedTuple):
    """What a file was from some moment on.

    Attributes:
        moment: When it was changed.
        content: Of the file.
        times: ``st_mtime_ns`` and ``st_ctime_ns``.
    """

    moment: int
    content: bytes
    times: tuple[int, int]


class File:
    """What a file was, and what of it was synced.

    Attributes:
        versions: After each change.
        synced: For each sync the moment when it had ended, the version that it covers,
            and whether it covers the times.
        link: Where the file has a second name.
    """

    def __init__(self, path: Path, link: Path) -> None:
        self.versions = [Version(0, b'', (0, 0))]
        self.synced = [(0, 0, True)]
        self.link = link
        _link(path, link)
        # Open, so that the inode is not given to another file.
        self.fd = _open(link, os.O_RDONLY | os.O_CLOEXEC)

    def look(self, moment: int) -> bool:
        """Note what the file is now; return whether it has changed."""
        status = os.fstat(self.fd)
        content = os.pread(self.fd, status.st_size, 0)
        version = Version(moment, content, (status.st_mtime_ns, status.st_ctime_ns))
        if version[1:] == self.versions[-1][1:]:
            return False
        self.versions.append(version)
        return True

    def note_sync(self, ended: int, covered: int, only_data: bool) -> None:
        """Note that all that was written up to a version is synced."""
        size = len(self.versions[self._synced(ended, of_times=False)].content)
        same = len(self.versions[covered].content) == size
        self.synced.append((ended, covered, not (only_data and same)))

    def contents(self, moment: int) -> list[bytes]:
        """Return what a crash may leave parts of, the newest first."""
        return [version.content for version in self._since(moment, of_times=False)]

    def times(self, moment: int) -> list[tuple[int, int]]:
        """Return the times that a crash may leave, the newest first."""
        return [version.times for version in self._since(moment, of_times=True)]

    def _since(self, moment: int, of_times: bool) -> list[Version]:
        until = [version for version in self.versions if version.moment <= moment]
        return until[self._synced(moment, of_times) :][::-1]

    def _synced(self, moment: int, of_times: bool) -> int:
        return max(
            covered
            for ended, covered, times in self.synced
            if ended <= moment and (times or not of_times)
        )


class Recorder:
    """Notes what happens to the files of a directory, and what is said of plants.

    Args:
        directory: Where the plant file is, with all that is beside it.
        links: An empty directory, where files are kept under a second name. So in a
            state they have the inodes that they had: an index says which one it is of.

    Attributes:
        calls: What happened at each moment, in words.
        changes: To the directory.
        named: The moment of the end of each sync of the directory, and the numbers of
            the changes that it covers.
        sent: The moment when each plant was sent.
        acknowledged: The moment when each plant was acknowledged.
        damage: What a person has put into the plant file, if one has.
        kept: What some file must have, since the moment that is given.
        continued: Called with a store that has opened a state.
        before_sync: Called when a sync has begun, before it is made.
    """

    def __init__(self, directory: Path, links: Path) -> None:
        self.directory = directory
        self.path = directory / 'plants.jsonl'
        self.files: list[File] = []
        self.changes: list[Change] = []
        self.named: list[tuple[int, set[int]]] = []
        self.calls = ['begin']
        self.sent: dict[Plant, int] = {}
        self.acknowledged: dict[Plant, int] = {}
        self.damage = b''
        self.kept = 0, b''
        self.continued: Callable[[PlantStore], object] = lambda store: None
        self.before_sync: Callable[[], object] | None = None
        self._links = links
        self._begun = 0
        self._mutex = threading.RLock()
        self._numbers: dict[int, int] = {}  # of a file, by its inode
        self._names: dict[str, int] = {}

    @property
    def now(self) -> int:
        """The last moment."""
        return len(self.calls) - 1

    @property
    def moments(self) -> range:
        """The moments at which there may be a crash."""
        return range(self._begun, len(self.calls))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is done meanwhile; what was done before is durable."""
        self.settle()
        self._begun = self.now
        functions = {name: self._noted(name) for name in BY_PATH + BY_DESCRIPTOR}
        functions |= {name: self._synced(name) for name in SYNCS}
        try:
            with mock.patch.multiple(os, **functions), _statuses(self._numbers):
                yield
        finally:
            for file in self.files:
                os.close(file.fd)

    def send(self, *plants: Plant) -> None:
        """Note that plants are sent."""
        for plant in plants:
            self.sent.setdefault(plant, self.now)

    def add(self, store: PlantStore, *plants: Plant) -> None:
        """Add plants, in one batch; they are acknowledged then."""
        self.send(*plants)
        told = store.add_many(plants)
        assert all(isinstance(new, bool) for new in told), told
        self.note(f'{len(plants)} acknowledged')
        for plant in plants:
            self.acknowledged.setdefault(plant, self.now)

    def append(self, data: bytes) -> None:
        """Write at the end of the plant file, as somebody who dies then."""
        with self.path.open('ab') as file:
            file.write(data)
        self.note('somebody appended')

    def keep(self, data: bytes) -> None:
        """Note that the end of the plant file must not vanish, once it is durable."""
        self.settle()
        self.kept = self.now, data

    def settle(self) -> None:
        """Make everything durable, as time does."""
        self.note('all is durable')
        for file in self.files:
            file.note_sync(self.now, len(file.versions) - 1, only_data=False)
        self.named.append((self.now, set(range(len(self.changes)))))

    def is_index(self, *names: str) -> bool:
        """Return whether all these files are of the index."""
        return all(name.startswith(self.path.name + INDEX) for name in names)

    def note(self, call: str) -> None:
        """Note that something happened, whether or not it has changed a file."""
        with self._mutex:
            self._look()
            self.calls.append(call)

    def _noted(self, name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def noted(target: Any, *arguments: Any, **options: Any) -> Any:
            self._look()
            try:
                return function(target, *arguments, **options)
            finally:
                self._look(f'{name} {self._called(target)}')

        return noted

    def _synced(self, name: str) -> Callable[[int], None]:
        function = getattr(os, name)

        def synced(fd: int) -> None:
            self.note(f'{name} {self._called(fd)} begins')
            number = self._numbers.get(os.fstat(fd).st_ino)
            version = len(self.files[number].versions) - 1 if number is not None else 0
            changes = set(range(len(self.changes)))
            if self.before_sync is not None:
                self.before_sync()
            function(fd)
            self.note(f'{name} {self._called(fd)} has ended')
            if number is not None:
                only_data = name == 'fdatasync'
                self.files[number].note_sync(self.now, version, only_data)
            elif os.path.samestat(os.fstat(fd), self.directory.stat()):
                self.named.append((self.now, changes))

        return synced

    def _called(self, target: Any) -> str:
        """Return how a path or a descriptor is called."""
        with suppress(TypeError):
            return os.path.basename(target)
        number = self._numbers.get(os.fstat(target).st_ino)
        names = [name for name, of in self._names.items() if of == number]
        return names[0] if names else 'the directory' if number is None else 'gone'

    def _look(self, call: str = UNSEEN) -> None:
        """Note what has changed since the last time, if anything has."""
        with self._mutex:
            self._look_alone(call)

    def _look_alone(self, call: str) -> None:
        moment = len(self.calls)
        before, self._names = self._names, {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                number = self._numbers.get(entry.inode())
                if number is None:
                    number = self._numbers[entry.inode()] = len(self.files)
                    file = File(Path(entry.path), self._links / f'{number}')
                    self.files.append(file)
                self._names[entry.name] = number
        changes = list(_changes(moment, before, self._names))
        changed = {file for file in self.files if file.look(moment)}
        if changes or changed:
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


@contextmanager
def _statuses(
    kept: Container[int],
    changed: Callable[[os.stat_result], dict[str, int]] = lambda status: {},
) -> Iterator[None]:
    """Hide from the status of files what is not so without a recorder.

    Args:
        kept: The inodes of the files that have a second name.
        changed: Returns what else is another in a status.
    """

    def told(function: Callable[..., os.stat_result]) -> Callable[..., Any]:
        def tell(*arguments: Any, **options: Any) -> os.stat_result:
            status = function(*arguments, **options)
            if status.st_ino not in kept:
                return status
            times = {name: getattr(status, name) for name in TIMES}
            links = status.st_nlink - 1
            return os.stat_result(
                (*status[:3], links, *status[4:]), times | changed(status)
            )

        return tell

    with mock.patch.multiple(os, stat=told(os.stat), fstat=told(os.fstat)):
        yield


class State(NamedTuple):
    """What a crash may leave.

    Attributes:
        crash: The crash.
        choices: Those that are not 0.
        files: The number, the content and the times of each file, by its name.
    """

    crash: Crash
    choices: Choices
    files: dict[str, tuple[int, bytes, tuple[int, int]]]

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Put it into the directory, in the place of what is there.

        Nobody can set a ``ctime``: meanwhile ``os.stat`` and ``os.fstat`` tell that of
        the state, until the file is changed.
        """
        recorder = self.crash.recorder
        for entry in os.scandir(recorder.directory):
            os.unlink(entry.path)
        ctimes = {}
        for name, (number, content, (mtime, ctime)) in self.files.items():
            path = recorder.directory / name
            os.link(recorder.files[number].link, path)
            path.write_bytes(content)
            os.utime(path, ns=(mtime, mtime))
            status = path.stat()
            ctimes[status.st_ino] = status.st_ctime_ns, ctime

        def changed(status: os.stat_result) -> dict[str, int]:
            now, then = ctimes.get(status.st_ino, (0, 0))
            return {'st_ctime_ns': then} if status.st_ctime_ns == now else {}

        with _statuses(ctimes, changed):
            yield

    def smallest(self, fails: Callable[[State], object]) -> State:
        """Return a state that fails, too, and from which no choice can be left out."""
        for left_out in self.choices:
            fewer = {key: n for key, n in self.choices.items() if key != left_out}
            state = self.crash.state(fewer)
            if fails(state):
                return state.smallest(fails)
        return self

    def __str__(self) -> str:
        moment = self.crash.moment
        calls = self.crash.recorder.calls[: moment + 1]
        lost = [f'  {self.crash.describe(*item)}' for item in self.choices.items()]
        return '\n'.join(
            [
                f'After moment {moment} of these:',
                *(f'  {at} {call}' for at, call in enumerate(calls)),
                f'the disk, of blocks of {self.crash.block} bytes, has all of it, but:',
                *(lost or ['  nothing']),
            ]
        )


class Crash:
    """A crash at one moment of a scenario.

    Args:
        recorder: What has happened.
        moment: When the crash is.
        block: How many bytes the disk writes at once.

    Attributes:
        questions: How many choices there are for each question.
    """

    def __init__(self, recorder: Recorder, moment: int, block: int) -> None:
        self.recorder = recorder
        self.moment = moment
        self.block = block
        self.questions: Choices = {}
        self._changes = [one for one in recorder.changes if one.moment <= moment]
        self._names: dict[int, set[str]] = {}  # that each file may have
        self._times: dict[int, list[tuple[int, int]]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._blocks: dict[int, list[list[bytes]]] = {}
        synced = set().union(*(at for ended, at in recorder.named if ended <= moment))
        for at, change in enumerate(self._changes):
            if at not in synced:
                self.questions['directory', at] = 2
            for name, number in change.names.items():
                if at in synced:  # nothing that had the name before can have it now
                    for names in self._names.values():
                        names.discard(name)
                if number is not None:
                    self._names.setdefault(number, set()).add(name)
        self._names = {number: names for number, names in self._names.items() if names}
        for number in self._names:
            file = recorder.files[number]
            contents = file.contents(moment)
            sizes = dict.fromkeys(map(len, contents))
            offsets = range(0, max(sizes), block)
            blocks = [_versions(contents, offset, block) for offset in offsets]
            sizes |= dict.fromkeys(at for at in offsets if at > min(sizes))
            self._times[number] = list(dict.fromkeys(file.times(moment)))
            self._sizes[number], self._blocks[number] = list(sizes), blocks
            self.questions['times', number] = len(self._times[number])
            self.questions['size', number] = len(sizes)
            for at, versions in enumerate(blocks):
                self.questions['block', number, at] = len(versions)
        self.questions = {key: n for key, n in self.questions.items() if n > 1}
        self._index = list(filter(self._is_about_index, self.questions))
        self._others = [key for key in self.questions if key not in self._index]

    def state(self, choices: Choices) -> State:
        """Return the state of some choices; the others are 0."""
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
                times = self._times[number][choices.get(('times', number), 0)]
                files[name] = number, content[:size], times
        return State(self, choices, files)

    def all(self, chance: Random, mixtures: int) -> Iterator[State]:
        """Yield every state of the plant file, each with some of the index.

        The index is as the processes saw it, as it was when it was last synced, and in
        mixtures that chance makes, so many or more.
        """
        counts = [self.questions[key] for key in self._others]
        oldest = {key: self.questions[key] - 1 for key in self._index}
        mixtures = max(mixtures, 20 // math.prod(counts))
        for numbers in itertools.product(*map(range, counts)):
            choices = dict(zip(self._others, numbers, strict=True))
            yield self.state(choices)
            if self._index:
                yield self.state(choices | oldest)
                for _ in range(mixtures):
                    yield self.state(choices | self._mixture(self._index, chance))

    def some(self, chance: Random) -> State:
        """Return a state that chance makes."""
        index, others = self._index, self._others
        return self.state(self._mixture(index, chance) | self._mixture(others, chance))

    def describe(self, question: Question, choice: int) -> str:
        """Return in words what a choice means."""
        kind, number, *at = question
        if kind == 'directory':
            return f'not in the directory: {self._changes[number].names}'
        names = ' or '.join(sorted(self._names[number]))
        if kind == 'size':
            return f'{names} has {self._sizes[number][choice]} bytes'
        if kind == 'times':
            return f'{names} has its times of {choice} versions ago'
        content = self._blocks[number][at[0]][choice]
        which = f'as it was {choice} versions ago' if any(content) else 'zeros'
        return f'block {at[0]} of {names} is {which}'

    def _is_about_index(self, question: Question) -> bool:
        kind, number, *_ = question
        if kind == 'directory':
            return self.recorder.is_index(*self._changes[number].names)
        # Of the plant file only the index looks at the times.
        return kind == 'times' or self.recorder.is_index(*self._names[number])

    def _mixture(self, questions: Iterable[Question], chance: Random) -> Choices:
        # All new, mostly new, half of each, mostly old and all old are as likely.
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
