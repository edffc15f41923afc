"""Generate every disk state that a crash may leave during a short scenario.

A recorder replaces the functions of ``os`` that change files. After each call it notes
the content of each file of one directory. So it also sees writes that bypass these
functions: through a memory map or by SQLite. Four rules say what a crash may leave:

* A block of a file is as it was when the last sync of the file began, or as it was at
  any moment since. If the file was shorter at such a moment, the block may be zeros.
* The file is as long as it was at any of these moments, or ends at a block boundary
  between them, whatever its blocks hold.
* Of the changes to the directory since its last sync, any may be lost. A rename is one
  change.
* The times of a file are as they were at the last sync that covered them, or later.
  ``fdatasync`` covers them if the size has changed.

So a state is one *choice* for each *question*: each block, each size, the times of each
file, and each change to the directory. Choice 0 is what the processes saw.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from store import Plant, PlantStore

BY_PATH = 'link', 'open', 'remove', 'rename', 'replace', 'truncate', 'unlink'
BY_DESCRIPTOR = 'ftruncate', 'posix_fallocate', 'pwrite', 'write'
SYNCS = 'fdatasync', 'fsync'
UNSEEN = 'a write that bypassed os'
INDEX = '.index'  # follows the plant file's name in the names of the index files

Question = tuple[str | int, ...]
Choices = dict[Question, int]

# The real functions, also while a recorder replaces them.
_link, _open = os.link, os.open


class Change(NamedTuple):
    """A change to the directory.

    Attributes:
        moment: When it happened.
        names: From each name to the number of its file from then on, or to ``None``.
    """

    moment: int
    names: dict[str, int | None]


class Version(NamedTuple):
    """The content and the times of a file from some moment on.

    Attributes:
        moment: When the file was changed.
        content: Its bytes.
        times: Its ``st_mtime_ns`` and ``st_ctime_ns``.
    """

    moment: int
    content: bytes
    times: tuple[int, int]


class File:
    """The history of a file: its versions and its syncs.

    Attributes:
        versions: The version after each change.
        synced: For each sync the moment of its end, the number of the version that it
            covers, and whether it covers the times.
        link: The second name of the file.
    """

    def __init__(self, path: Path, link: Path) -> None:
        self.versions = [Version(0, b'', (0, 0))]
        self.synced = [(0, 0, True)]
        self.link = link
        _link(path, link)
        # Keep it open, so that the inode number is not used again.
        self.fd = _open(link, os.O_RDONLY | os.O_CLOEXEC)

    def note_version(self, moment: int) -> bool:
        """Note the file as it is now; return whether it has changed."""
        status = os.fstat(self.fd)
        content = os.pread(self.fd, status.st_size, 0)
        version = Version(moment, content, (status.st_mtime_ns, status.st_ctime_ns))
        if version[1:] == self.versions[-1][1:]:
            return False
        self.versions.append(version)
        return True

    def note_sync(self, ended: int, covered: int, only_data: bool) -> None:
        """Note that the writes up to a version are synced."""
        size = len(self.versions[self._covered(ended, of_times=False)].content)
        same = len(self.versions[covered].content) == size
        self.synced.append((ended, covered, not (only_data and same)))

    def contents(self, moment: int) -> list[bytes]:
        """Return the contents whose parts a crash may leave, the newest first."""
        return [version.content for version in self._since(moment, of_times=False)]

    def times(self, moment: int) -> list[tuple[int, int]]:
        """Return the times that a crash may leave, the newest first."""
        return [version.times for version in self._since(moment, of_times=True)]

    def _since(self, moment: int, of_times: bool) -> list[Version]:
        until = [version for version in self.versions if version.moment <= moment]
        return until[self._covered(moment, of_times) :][::-1]

    def _covered(self, moment: int, of_times: bool) -> int:
        """Return the number of the version that the last sync covers."""
        return max(
            covered
            for ended, covered, times in self.synced
            if ended <= moment and (times or not of_times)
        )


class Recorder:
    """Records the changes to the files of a directory, and which plants are promised.

    Args:
        directory: The directory of the plant file and the files beside it.
        links: An empty directory, for a second name of each file. So the files of a
            state keep their inodes: an index names the inode of its plant file.

    Attributes:
        calls: What happened at each moment, in words.
        changes: The changes to the directory.
        directory_syncs: For each sync of the directory the moment of its end and the
            numbers of the changes that it covers.
        sent: The moment when each plant was sent.
        acknowledged: The moment when each plant was acknowledged.
        damage: The bytes with which a person has damaged the plant file, if any.
        kept: A moment, and bytes that some file must hold from that moment on.
        continued: Called with a store that has opened a state.
        before_sync: Called when a sync has begun, before the real call.
    """

    def __init__(self, directory: Path, links: Path) -> None:
        self.directory = directory
        self.path = directory / 'plants.jsonl'
        self.files: list[File] = []
        self.changes: list[Change] = []
        self.directory_syncs: list[tuple[int, set[int]]] = []
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
        self._numbers: dict[int, int] = {}  # from an inode to the number of its file
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
        """Record what happens in the block; earlier changes are durable."""
        self.settle()
        self._begun = self.now
        functions = {name: self._change(name) for name in BY_PATH + BY_DESCRIPTOR}
        functions |= {name: self._sync(name) for name in SYNCS}
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
        for file in self.files:
            file.note_sync(self.now, len(file.versions) - 1, only_data=False)
        self.directory_syncs.append((self.now, set(range(len(self.changes)))))

    def is_index(self, *names: str) -> bool:
        """Return whether all these names are of index files."""
        return all(name.startswith(self.path.name + INDEX) for name in names)

    def note(self, call: str) -> None:
        """Note an event, whether or not it has changed a file."""
        with self._mutex:
            self._note_changes()
            self.calls.append(call)

    def _change(self, name: str) -> Callable[..., Any]:
        """Return a function of ``os`` that changes files, and notes the changes."""
        function = getattr(os, name)

        def change(target: Any, *arguments: Any, **options: Any) -> Any:
            self._note_changes()
            try:
                return function(target, *arguments, **options)
            finally:
                self._note_changes(f'{name} {self._name(target)}')

        return change

    def _sync(self, name: str) -> Callable[[int], None]:
        """Return a function of ``os`` that syncs, and notes what the sync covers."""
        function = getattr(os, name)

        def sync(fd: int) -> None:
            self.note(f'{name} {self._name(fd)} begins')
            number = self._numbers.get(os.fstat(fd).st_ino)
            version = len(self.files[number].versions) - 1 if number is not None else 0
            changes = set(range(len(self.changes)))
            if self.before_sync is not None:
                self.before_sync()
            function(fd)
            self.note(f'{name} {self._name(fd)} has ended')
            if number is not None:
                only_data = name == 'fdatasync'
                self.files[number].note_sync(self.now, version, only_data)
            elif os.path.samestat(os.fstat(fd), self.directory.stat()):
                self.directory_syncs.append((self.now, changes))

        return sync

    def _name(self, target: Any) -> str:
        """Return the file name of a path or of a descriptor."""
        with suppress(TypeError):
            return os.path.basename(target)
        number = self._numbers.get(os.fstat(target).st_ino)
        names = [name for name, of in self._names.items() if of == number]
        return names[0] if names else 'the directory' if number is None else 'gone'

    def _note_changes(self, call: str = UNSEEN) -> None:
        """Note what has changed since the last time, if anything has."""
        with self._mutex:
            self._note_changes_locked(call)

    def _note_changes_locked(self, call: str) -> None:
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
        changed = {file for file in self.files if file.note_version(moment)}
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
    linked: Container[int],
    changed: Callable[[os.stat_result], dict[str, int]] = lambda status: {},
) -> Iterator[None]:
    """Hide from the status of files what the recorder has changed.

    Args:
        linked: The inodes of the files that have a second name.
        changed: Returns further members of a status to replace.
    """

    def replaced(function: Callable[..., os.stat_result]) -> Callable[..., Any]:
        def get_status(*arguments: Any, **options: Any) -> os.stat_result:
            status = function(*arguments, **options)
            if status.st_ino not in linked:
                return status
            # What it is pickled as: quicker than name by name.
            make, (numbers, named) = status.__reduce__()
            links = status.st_nlink - 1
            return make((*numbers[:3], links, *numbers[4:]), named | changed(status))

        return get_status

    with mock.patch.multiple(os, stat=replaced(os.stat), fstat=replaced(os.fstat)):
        yield


class State(NamedTuple):
    """A state of the directory that a crash may leave.

    Attributes:
        crash: The crash.
        choices: The choices that are not 0.
        files: From each name to the number, the content and the times of its file.
    """

    crash: Crash
    choices: Choices
    files: dict[str, tuple[int, bytes, tuple[int, int]]]

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Replace the content of the directory by this state.

        A ``ctime`` cannot be set. So within the block ``os.stat`` and ``os.fstat``
        return the one of the state, until the file is changed.
        """
        recorder = self.crash.recorder
        for entry in os.scandir(recorder.directory):
            os.unlink(entry.path)
        ctimes = {}
        for name, (number, content, (mtime, ctime)) in self.files.items():
            path = f'{recorder.directory}/{name}'
            os.link(recorder.files[number].link, path)
            fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            os.write(fd, content)
            os.utime(fd, ns=(mtime, mtime))
            status = os.fstat(fd)
            os.close(fd)
            ctimes[status.st_ino] = status.st_ctime_ns, ctime

        def changed(status: os.stat_result) -> dict[str, int]:
            now, then = ctimes.get(status.st_ino, (0, 0))
            return {'st_ctime_ns': then} if status.st_ctime_ns == now else {}

        with _statuses(ctimes, changed):
            yield

    def smallest(self, fails: Callable[[State], object]) -> State:
        """Return a failing state with as few choices as this failure needs."""
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
                f'the disk (blocks of {self.crash.block} bytes) holds all but:',
                *(lost or ['  nothing']),
            ]
        )


class Crash:
    """A crash at one moment of a scenario.

    Args:
        recorder: The recorder of the scenario.
        moment: When the crash happens.
        block: How many bytes the disk writes at once.

    Attributes:
        questions: The number of choices for each question.
    """

    def __init__(self, recorder: Recorder, moment: int, block: int) -> None:
        self.recorder = recorder
        self.moment = moment
        self.block = block
        self.questions: Choices = {}
        self._changes = [item for item in recorder.changes if item.moment <= moment]
        self._names: dict[int, set[str]] = {}  # that each file may have after it
        self._times: dict[int, list[tuple[int, int]]] = {}
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
                times = self._times[number][choices.get(('times', number), 0)]
                files[name] = number, content[:size], times
        return State(self, choices, files)

    def all_states(self, chance: Random, mixtures: int) -> Iterator[State]:
        """Yield every state of the plant file, each with several states of the index.

        These are: as the processes saw the index, as it was last synced, and at least
        ``mixtures`` random mixtures.
        """
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
        """Say in words what a choice means."""
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
        # Only the index depends on times, also on those of the plant file.
        return kind == 'times' or self.recorder.is_index(*self._names[number])

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
