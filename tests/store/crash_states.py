"""Generate every state of a directory that a crash may leave during a short scenario.

A *recorder* replaces the functions of ``os`` that change files. After each call it
notes the content of every file of one directory; these *moments* are numbered. A
*crash* at a moment asks what the disk has by then, and generates the answers.

What is modelled
    A disk with a cache writes blocks of 512 or 4,096 bytes, each at once, in any order.
    So after a crash, if a file was last synced at some moment,

    * each block of it is as it was then, or as at any moment since; a block behind the
      end that it had then may be NULs;
    * the file is as long as it was at one of these moments, or a whole number of blocks
      between two of them: a file system may make a file longer before it writes;
    * each change to the directory since *its* last sync is lost or not: a new file or a
      removal. A sync of a file does not cover its name.

    A sync covers what was written before it began. It counts from when it has ended.

How the states are counted
    Each block, each size and each change to the directory is a *question*; a state is
    one *choice* for each of them. Choice 0 is always what the processes saw, so a state
    is described by its other choices, and shrinks to a *smallest* one: leave out a
    choice, and see whether it still shows the fault.

What is left out
    * Blocks that a disk writes in part, or returns with flipped bits. A record has no
      checksum; that its bytes are JSON is all that tells.
    * What a failed sync leaves: ``disk.Disk`` has that, for single faults.
    * Times and owners of files, since the store reads none.
    * A disk that lies about its syncs: nothing can be built on it.

Who uses it
    ``test_crash_states.py`` runs scenarios, and opens each state with the store:
    acknowledged plants are there, no id is given twice, no record and no byte has gone.
    It also leaves out a sync on purpose, and expects a state that shows it.
"""

import itertools
import math
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from disk import path_of

CHANGES = 'open', 'unlink', 'ftruncate', 'pwrite', 'write'
SYNCS = 'fdatasync', 'fsync'
UNSEEN = 'a write that bypassed os'

_open = os.open  # the real one, also while a recorder replaces it


class Change(NamedTuple):
    """A change to the directory."""

    moment: int
    name: str
    number: int | None  # of its file from then on, if any


class File:
    """The history of a file: what it held, and which of that is durable."""

    def __init__(self, path):
        self.versions = [(0, b'')]  # a moment, and the content from then on
        # For each sync the moment of its end, and the number of the version it covers.
        self.synced = [(0, 0)]
        # Kept open, so that the inode number is not used again.
        self.fd = _open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def last(self):
        """The number of the latest version."""
        return len(self.versions) - 1

    def note(self, moment):
        """Note the file as it is now; return whether it has changed."""
        content = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        if content == self.versions[-1][1]:
            return False
        self.versions.append((moment, content))
        return True

    def possible(self, moment):
        """Return the contents of which a crash may leave parts, the newest first."""
        until = [content for at, content in self.versions if at <= moment]
        return until[max(at for ended, at in self.synced if ended <= moment) :][::-1]


class Recorder:
    """Records the changes to the files of a directory, and the promised plants."""

    def __init__(self, directory):
        self.directory = directory
        self.path = directory / 'plants.jsonl'
        self.files = []
        self.changes = []
        # For each sync of the directory the moment of its end, and how many changes it
        # covers.
        self.directory_syncs = []
        self.calls = ['begin']  # what happened at each moment
        self.begun = 0  # the first moment at which there may be a crash
        self.sent = {}  # the moment of each plant
        self.acknowledged = {}  # the moment of each plant
        self.is_damaged = False  # whether a repair may be needed
        self.kept = 0, b''  # a moment, and what some file must hold from then on
        self.before_sync = None  # called when a sync has begun, before the real call
        self._mutex = threading.RLock()
        self._numbers = {}  # from an inode to the number of its file
        self._names = {}

    @property
    def now(self):
        """The last moment."""
        return len(self.calls) - 1

    @contextmanager
    def recording(self):
        """Record what happens in the block; earlier changes are durable."""
        self.settle()
        self.begun = self.now
        functions = {name: self._change(name) for name in CHANGES}
        functions |= {name: self._sync(name) for name in SYNCS}
        try:
            with mock.patch.multiple(os, **functions):
                yield
        finally:
            for file in self.files:
                os.close(file.fd)

    def send(self, *plants):
        """Note that plants are sent."""
        for plant in plants:
            self.sent.setdefault(plant, self.now)

    def add(self, store, *plants):
        """Add plants in one batch, and note that they are acknowledged."""
        self.send(*plants)
        outcomes = store.add_many(plants)
        assert all(isinstance(new, bool) for new in outcomes), outcomes
        self.note(f'{len(plants)} acknowledged')
        for plant in plants:
            self.acknowledged.setdefault(plant, self.now)

    def append(self, data):
        """Append to the plant file, as a process that is killed before its sync."""
        with self.path.open('ab') as file:
            file.write(data)
        self.note('a process appended and was killed')

    def keep(self, data):
        """Make the end of the plant file durable; it must not vanish from now on."""
        self.settle()
        self.kept = self.now, data

    def settle(self):
        """Make everything durable, as the kernel does after some time."""
        self.note('everything is durable')
        for file in self.files:
            file.synced.append((self.now, file.last))
        self.directory_syncs.append((self.now, len(self.changes)))

    def note(self, call):
        """Note an event, whether or not it has changed a file."""
        with self._mutex:
            self._note_changes()
            self.calls.append(call)

    def _change(self, name):
        """Return a function of ``os`` that changes files, and notes the changes."""
        function = getattr(os, name)

        def change(target, *arguments, **options):
            self._note_changes()
            try:
                return function(target, *arguments, **options)
            finally:
                self._note_changes(f'{name} {path_of(target)}')

        return change

    def _sync(self, name):
        """Return a function of ``os`` that syncs, and notes what the sync covers."""
        function = getattr(os, name)

        def sync(fd):
            self.note(f'{name} {path_of(fd)} begins')
            number = self._numbers.get(os.fstat(fd).st_ino)
            version = self.files[number].last if number is not None else 0
            changes = len(self.changes)
            if self.before_sync is not None:
                self.before_sync()
            function(fd)
            self.note(f'{name} {path_of(fd)} has ended')
            if number is not None:
                self.files[number].synced.append((self.now, version))
            elif os.path.samestat(os.fstat(fd), self.directory.stat()):
                self.directory_syncs.append((self.now, changes))

        return sync

    def _note_changes(self, call=UNSEEN):
        """Note what has changed since the last time, if anything has."""
        with self._mutex:
            moment = len(self.calls)
            before, self._names = self._names, {}
            for entry in os.scandir(self.directory):
                number = self._numbers.setdefault(entry.inode(), len(self.files))
                if number == len(self.files):
                    self.files.append(File(entry.path))
                self._names[entry.name] = number
            changes = list(_changes(moment, before, self._names))
            changed = [file for file in self.files if file.note(moment)]
            if changes or changed:
                self.changes += changes
                self.calls.append(call)


def _changes(moment, before, after):
    """Yield what has changed in a directory: new names, and names that are gone."""
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield Change(moment, name, after.get(name))


class State(NamedTuple):
    """A state of the directory that a crash may leave."""

    crash: 'Crash'
    choices: dict  # that are not 0
    files: dict  # content by name

    def place(self):
        """Replace the content of the directory by this state."""
        directory = self.crash.recorder.directory
        for entry in os.scandir(directory):
            os.unlink(entry.path)
        for name, content in self.files.items():
            Path(directory, name).write_bytes(content)

    def smallest(self, fails):
        """Return a failing state with as few choices as this failure needs."""
        for left_out in self.choices:
            fewer = {key: n for key, n in self.choices.items() if key != left_out}
            state = self.crash.state(fewer)
            if fails(state):
                return state.smallest(fails)
        return self

    def __str__(self):
        recorder, moment = self.crash.recorder, self.crash.moment
        calls = ''.join(f'  {call}\n' for call in recorder.calls[: moment + 1])
        lost = [f'  {self.crash.describe(*item)}\n' for item in self.choices.items()]
        return f'After\n{calls}the disk has the newest of all but\n{"".join(lost)}'


class Crash:
    """A crash at one moment of a scenario, on a disk that writes blocks of bytes."""

    def __init__(self, recorder, moment, block):
        self.recorder = recorder
        self.moment = moment
        self.block = block
        self.questions = {}  # the number of choices for each question
        self._changes = [item for item in recorder.changes if item.moment <= moment]
        self._sizes = {}
        self._blocks = {}
        syncs = recorder.directory_syncs
        synced = max((count for ended, count in syncs if ended <= moment), default=0)
        for at in range(synced, len(self._changes)):
            self.questions['directory', at] = 2
        for number in {change.number for change in self._changes} - {None}:
            contents = recorder.files[number].possible(moment)
            sizes = dict.fromkeys(map(len, contents))
            offsets = range(0, max(sizes), block)
            sizes |= dict.fromkeys(at for at in offsets if at > min(sizes))
            blocks = [_versions(contents, offset, block) for offset in offsets]
            self._sizes[number], self._blocks[number] = list(sizes), blocks
            self.questions['size', number] = len(sizes)
            for at, kinds in enumerate(blocks):
                self.questions['block', number, at] = len(kinds)
        self.questions = {key: n for key, n in self.questions.items() if n > 1}

    def state(self, choices):
        """Return the state with these choices; all others are 0."""
        names = {}
        for at, change in enumerate(self._changes):
            if not choices.get(('directory', at)):
                names[change.name] = change.number
        files = {}
        for name, number in names.items():
            if number is not None:
                size = self._sizes[number][choices.get(('size', number), 0)]
                blocks = (
                    kinds[choices.get(('block', number, at), 0)]
                    for at, kinds in enumerate(self._blocks[number])
                )
                files[name] = b''.join(blocks)[:size]
        lost = {key: choice for key, choice in choices.items() if choice}
        return State(self, lost, files)

    def states(self, chance, most):
        """Yield every state; if there are more than ``most``, so many random ones."""
        counts = self.questions.values()
        if math.prod(counts) > most:
            yield from (self.random_state(chance) for _ in range(most))
            return
        for choices in itertools.product(*map(range, counts)):
            yield self.state(dict(zip(self.questions, choices, strict=True)))

    def random_state(self, chance):
        """Return a random state."""
        # All new, mostly new, half old, mostly old, all old: with equal chance.
        old = chance.choice([0, 0.1, 0.5, 0.9, 1])
        choices = {
            question: chance.randrange(1, count)
            for question, count in self.questions.items()
            if chance.random() < old
        }
        return self.state(choices)

    def describe(self, question, choice):
        """Say which choice was taken for which part of which file."""
        kind, number, *at = question
        of = self._changes[number] if kind == 'directory' else f'of file {number}'
        return f'{kind} {at or ""} {of}: {choice} (blocks of {self.block} bytes)'


def _versions(contents, offset, block):
    """Return what a block may hold, the newest first."""
    blocks = [content[offset : offset + block] for content in contents]
    return list(dict.fromkeys(content.ljust(block, b'\0') for content in blocks))
