"""Every state of the disk that a crash may leave, of a short scenario.

A recorder stands in the place of the functions of ``os`` that change files. It keeps
what each file of one directory held after each call, so it sees also what was written
past those functions, into a map of memory or by SQLite. What a crash may leave at any
moment follows from three rules:

* A block of a file is as it was when the last sync of the file began, or as it was at
  any moment since. A block that the file did not have all that time may be zeros.
* The file is as long as it was at any of these moments, whatever became of its blocks.
* Of the changes to the directory since its last sync, any may be lost. A rename is one
  change.

A state is one *choice* for each of these. Choice 0 is what the processes saw.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from typing import NamedTuple
from unittest import mock

from store import Plant

BY_PATH = 'link', 'open', 'remove', 'rename', 'replace', 'truncate', 'unlink'
BY_DESCRIPTOR = 'ftruncate', 'posix_fallocate', 'pwrite', 'write'
SYNCS = 'fdatasync', 'fsync'

_link, _open = os.link, os.open  # as they are, while a recorder stands in their place

# Names of the index begin with the name of the plant file and this.
INDEX = '.index'


class Change(NamedTuple):
    """A change to the directory.

    Attributes:
        moment: When.
        names: The file that each name has from then on, or ``None``.
    """

    moment: int
    names: dict[str, int | None]

    def __str__(self) -> str:
        lost = ', '.join(
            f'{name} is file {number}' if number is not None else f'{name} is gone'
            for name, number in self.names.items()
        )
        return f'not in the directory: {lost}'


class File:
    """What a file held, and what of it was synced.

    Attributes:
        versions: The moment and the content after each change.
        synced: The moment of the end of each sync, and the version that it covers.
    """

    def __init__(self, path: Path, kept: Path | None) -> None:
        self.versions: list[tuple[int, bytes]] = []
        self.synced = [(0, 0)]
        self.kept = kept
        # NOTE: not closed before the scenario ends. That would take the locks away
        # that SQLite has on the file. And while it is open its inode is not reused.
        self.fd = _open(path, os.O_RDWR | os.O_CLOEXEC)
        if kept is not None:
            _link(path, kept)

    def look(self, moment: int) -> bool:
        """Note what the file holds now; return whether it has changed."""
        content = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        if self.versions and self.versions[-1][1] == content:
            return False
        if not self.versions:
            self.versions.append((moment, b''))  # nothing of it is synced
        self.versions.append((moment, content))
        return True

    def contents(self, moment: int) -> list[bytes]:
        """Return what a crash may leave parts of, the newest first."""
        oldest = max(version for ended, version in self.synced if ended <= moment)
        since = [content for began, content in self.versions if began <= moment]
        return since[oldest:][::-1]


class Recorder:
    """Notes what happens to the files of a directory, and what is said of plants.

    Args:
        directory: Where the plant file is, with all that is beside it.
        kept: A directory where files are kept under a second name, so that a state
            has the inodes that the scenario had: an index names the one it is of.

    Attributes:
        calls: What happened at each moment, in words.
        sent: The moment when each plant was sent.
        acknowledged: The moment when each plant was acknowledged.
        damage: What a person has put into the plant file, if one has.
        before_sync: Called, once, when the next sync has begun.
    """

    def __init__(self, directory: Path, kept: Path) -> None:
        self.directory = directory
        self.path = directory / 'plants.jsonl'
        self.files: list[File] = []
        self.changes: list[Change] = []
        self.named: list[tuple[int, int]] = [(0, 0)]  # moment and changes of each sync
        self.calls: list[str] = ['begin']
        self.sent: dict[Plant, int] = {}
        self.acknowledged: dict[Plant, int] = {}
        self.damage = b''
        self.before_sync: Callable[[], object] | None = None
        self._kept = kept
        self._numbers: dict[int, int] = {}  # of a file, by its inode
        self._names: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is done meanwhile."""
        functions = {name: self._noted(name) for name in BY_PATH + BY_DESCRIPTOR}
        functions |= {name: self._synced(name) for name in SYNCS}
        try:
            with mock.patch.multiple(os, **functions):
                yield
        finally:
            for file in self.files:
                os.close(file.fd)

    def add(self, store: Any, *plants: Plant) -> None:
        """Add plants, together if they are many; they are acknowledged then."""
        self.send(*plants)
        if len(plants) == 1:
            store.add(*plants)
        else:
            assert not [told for told in store.add_many(plants) if told is None]
        self._note(f'{len(plants)} acknowledged')
        for plant in plants:
            self.acknowledged.setdefault(plant, len(self.calls) - 1)

    def send(self, *plants: Plant) -> None:
        """Note that plants are sent."""
        for plant in plants:
            self.sent.setdefault(plant, len(self.calls) - 1)

    def append(self, data: bytes) -> None:
        """Write at the end of the plant file, as one that dies then or as a person."""
        with self.path.open('ab') as file:
            file.write(data)
        self._look('append')

    def settle(self) -> None:
        """Make everything durable, as time does."""
        self._note('all is durable')
        moment = len(self.calls) - 1
        for file in self.files:
            file.synced.append((moment, len(file.versions) - 1))
        self.named.append((moment, len(self.changes)))

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
            self._note(f'{name} {self._called(fd)} begins')
            before, self.before_sync = self.before_sync, None
            number = self._numbers.get(os.fstat(fd).st_ino)
            if number is not None:
                covered = len(self.files[number].versions) - 1
            else:
                covered = len(self.changes)
            if before is not None:
                before()
            function(fd)
            self._note(f'{name} {self._called(fd)} has ended')
            ended = len(self.calls) - 1
            if number is not None:
                self.files[number].synced.append((ended, covered))
            elif os.path.samestat(os.fstat(fd), self.directory.stat()):
                self.named.append((ended, covered))

        return synced

    def _called(self, target: Any) -> str:
        """Return how a path or a descriptor is called."""
        if isinstance(target, int):
            number = self._numbers.get(os.fstat(target).st_ino)
            return 'the directory' if number is None else f'file {number}'
        return os.path.basename(target)

    def _note(self, call: str) -> None:
        self._look()
        self.calls.append(call)

    def _look(self, call: str = 'something') -> None:
        """Note what has changed since the last time, if anything has."""
        moment = len(self.calls)
        names = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                number = self._numbers.get(entry.inode())
                if number is None:
                    number = self._numbers[entry.inode()] = len(self.files)
                    beside = entry.name.startswith(self.path.name + INDEX)
                    kept = None if beside else self._kept / f'{number}'
                    self.files.append(File(Path(entry.path), kept))
                names[entry.name] = number
        before = len(self.changes)
        self.changes += _changes(moment, self._names, names)
        self._names = names
        changed = [file.look(moment) for file in self.files]
        if any(changed) or len(self.changes) > before:
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
    """What a crash may leave.

    Attributes:
        moment: The moment of the crash.
        block: The size of a block, in bytes.
        choices: Which are not 0, by what they are about.
        files: The content and the number of each file, by its name.
    """

    moment: int
    block: int
    choices: dict[tuple[Any, ...], int]
    files: dict[str, tuple[bytes, int]]


class Crash:
    """A crash at one moment of a scenario.

    Attributes:
        questions: How many choices there are, by what they are about: a change to the
            directory, the size of a file, or a block of it.
    """

    def __init__(self, recorder: Recorder, moment: int, block: int) -> None:
        self.recorder = recorder
        self.moment = moment
        self.block = block
        named = max(count for ended, count in recorder.named if ended <= moment)
        self._durable = recorder.changes[:named]
        self._changes = [
            change for change in recorder.changes[named:] if change.moment <= moment
        ]
        self._sizes: dict[int, list[int]] = {}
        self._blocks: dict[int, list[list[bytes]]] = {}
        self.questions: dict[tuple[Any, ...], int] = {}
        self.names: dict[int, set[str]] = {}  # that each file may have
        for number, change in enumerate(self._changes):
            self.questions['directory', number] = 2
        for change in self._durable + self._changes:
            for name, number in change.names.items():
                if number is not None:
                    self.names.setdefault(number, set()).add(name)
        for number in self.names:
            contents = recorder.files[number].contents(moment)
            sizes = list(dict.fromkeys(map(len, contents)))
            blocks = [
                _versions(contents, at, block) for at in range(0, max(sizes), block)
            ]
            self._sizes[number], self._blocks[number] = sizes, blocks
            self.questions['size', number] = len(sizes)
            for at, versions in enumerate(blocks):
                self.questions['block', number, at] = len(versions)
        self.questions = {key: n for key, n in self.questions.items() if n > 1}

    def is_about_index(self, question: tuple[Any, ...]) -> bool:
        """Return whether a choice is about the index alone."""
        kind, number, *_ = question
        if kind == 'directory':
            names = set(self._changes[number].names)
        else:
            names = self.names[number]
        index = self.recorder.path.name + INDEX
        return all(name.startswith(index) for name in names)

    def state(self, choices: dict[tuple[Any, ...], int]) -> State:
        """Return the state of some choices; the others are 0."""
        choices = {key: choice for key, choice in choices.items() if choice}
        names: dict[str, int | None] = {}
        for change in self._durable:
            names |= change.names
        for number, change in enumerate(self._changes):
            if ('directory', number) not in choices:
                names |= change.names
        files = {}
        for name, file in names.items():
            if file is not None:
                size = self._sizes[file][choices.get(('size', file), 0)]
                content = b''.join(
                    versions[choices.get(('block', file, at), 0)]
                    for at, versions in enumerate(self._blocks[file])
                )
                files[name] = content[:size], file
        return State(self.moment, self.block, choices, files)

    def all(self, chance: random.Random, mixtures: int) -> Iterator[State]:
        """Yield every state of the plant file, each with some of the index.

        The index is as the processes saw it, as it was at the last sync, and in
        mixtures that chance makes.
        """
        index = [key for key in self.questions if self.is_about_index(key)]
        others = [key for key in self.questions if key not in index]
        oldest = {key: self.questions[key] - 1 for key in index}
        for numbers in itertools.product(
            *(range(self.questions[key]) for key in others)
        ):
            choices = dict(zip(others, numbers, strict=True))
            yield self.state(choices)
            if index:
                yield self.state(choices | oldest)
                for _ in range(mixtures):
                    yield self.state(choices | self._mixture(index, chance))

    def sample(self, chance: random.Random) -> State:
        """Return a state that chance makes."""
        index = [key for key in self.questions if self.is_about_index(key)]
        others = [key for key in self.questions if key not in index]
        return self.state(self._mixture(index, chance) | self._mixture(others, chance))

    def count(self) -> int:
        """Return how many choices there are about anything but the index."""
        return math.prod(
            count for key, count in self.questions.items() if not self.is_about_index(key)
        )

    def _mixture(
        self, keys: list[tuple[Any, ...]], chance: random.Random
    ) -> dict[tuple[Any, ...], int]:
        # Mostly new, mostly old, or half of each: all are likely.
        old = chance.choice([0, 0.1, 0.5, 0.9, 1])
        return {
            key: chance.randrange(1, self.questions[key])
            for key in keys
            if chance.random() < old
        }

    def describe(self, state: State) -> str:
        """Return in words what makes a state."""
        calls = self.recorder.calls
        text = [
            f'a crash at moment {self.moment}, blocks of {self.block} bytes; before it:',
            *(f'  {at} {calls[at]}' for at in range(self.moment + 1)),
            'the disk has what the processes saw, but:',
        ]
        for (kind, number, *at), choice in state.choices.items():
            if kind == 'directory':
                text.append(f'  {self._changes[number]}')
                continue
            who = f'  file {number} ({", ".join(sorted(self.names[number]))})'
            if kind == 'size':
                text.append(f'{who} has {self._sizes[number][choice]} bytes')
            else:
                content = self._blocks[number][at[0]][choice]
                zeros = 'zeros' if not any(content) else f'of earlier ({choice})'
                text.append(f'{who} has block {at[0]} {zeros}')
        text.append(f'choices: {state.choices}')
        return '\n'.join(text)


def _versions(contents: list[bytes], at: int, block: int) -> list[bytes]:
    """Return what a block may hold, the newest first."""
    blocks = [content[at : at + block].ljust(block, b'\0') for content in contents]
    return list(dict.fromkeys(blocks))


def place(recorder: Recorder, state: State) -> None:
    """Put a state into the directory of a recorder, in the place of what is there."""
    for entry in os.scandir(recorder.directory):
        os.unlink(entry.path)
    for name, (content, number) in state.files.items():
        kept = recorder.files[number].kept
        path = recorder.directory / name
        if kept is not None:
            os.link(kept, path)
        path.write_bytes(content)
