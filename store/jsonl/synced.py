"""What every process knows of a plant file at once: ``plants.jsonl.index-synced``.

The file has two records, each with the inode of the plant file and a CRC-32:

* the *synced end*: a sync has covered all bytes before it. A process notes it before
  it acknowledges a plant. So a plant file that is shorter has lost acknowledged plants,
  and a process that has never read these lines refuses it, too. The mark of the index
  follows a second later: until then ids could be given again.
* the length of the latest write, if it failed, or 0: any process may be asked whether
  an add would work.

No record is synced. After a power cut it may be an older one, which is true too: a sync
of the plant file comes before each note. A record that is not believed says nothing.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path

from store.jsonl.disk import index_path, new_file, write

UNKNOWN = -1
SIZE = 64  # bytes from one record to the next
RECORD = struct.Struct('<QqL')  # inode, value, CRC-32 of both


class Synced:
    """The file, open. Making it and ``read`` REQUIRE the lock of the plant file."""

    def __init__(self, path: Path, plants: int) -> None:
        self._like = os.fstat(plants)
        self._path = index_path(path, '-synced')
        self._fd = self._open()

    def _open(self) -> int:
        with suppress(FileNotFoundError):
            return os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        fd = new_file(self._path, self._like)
        write(fd, bytes(2 * SIZE), 0)  # not later, when the disk may be full
        return fd

    def read(self) -> tuple[int, int]:
        """Return the synced end, or ``UNKNOWN``, and the length of a failed write."""
        if not os.fstat(self._fd).st_nlink:  # it was removed
            # Not closed first: another thread may note an end meanwhile.
            fd = self._open()
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
        data = os.pread(self._fd, 2 * SIZE, 0)
        inode = self._like.st_ino
        return _value(data, inode), max(_value(data[SIZE:], inode), 0)

    def note_end(self, end: int) -> None:
        """Note a synced end. Of two processes the slower may note a lower end."""
        self._note(0, end)

    def note_failure(self, length: int) -> None:
        """Note the length of a write that failed; 0 after one that did not."""
        self._note(SIZE, length)

    def _note(self, offset: int, value: int) -> None:
        with suppress(OSError):  # a full disk: it says less, and nothing wrong
            write(self._fd, _record(self._like.st_ino, value), offset)

    def close(self) -> None:
        """Close the file; a thread that has just synced may note an end after this."""
        fd, self._fd = self._fd, -1
        os.close(fd)


def read_synced(path: Path, plants: int) -> int:
    """Return the synced end of a plant file, or ``UNKNOWN``; nothing is made."""
    with suppress(OSError):
        data = index_path(path, '-synced').read_bytes()
        return _value(data, os.fstat(plants).st_ino)
    return UNKNOWN


def _record(inode: int, value: int) -> bytes:
    crc = zlib.crc32(RECORD.pack(inode, value, 0))
    return RECORD.pack(inode, value, crc)


def _value(data: bytes, inode: int) -> int:
    value = int.from_bytes(data[8:16], 'little', signed=True)
    return value if data.startswith(_record(inode, value)) else UNKNOWN
