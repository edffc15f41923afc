"""What every process knows of a plant file at once: ``plants.jsonl.index-synced``.

The file has two records, each with the inode of the plant file and a CRC-32:

* the *synced end*: a sync has covered all bytes before it. A process notes it before
  it acknowledges a plant. So a plant file that is shorter has lost acknowledged plants,
  and a process that has never read these lines refuses it, too. The mark of the index
  follows a second later, which is too late: in that second a file that was cut short
  would let ids be given again (``test_shortened_file_is_refused_by_a_new_worker``).
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
SIZE = 64  # bytes of a record
RECORD = struct.Struct('<QqL')  # inode, value, CRC-32 of both


class Synced:
    """The file ``plants.jsonl.index-synced``, open.

    Making it and ``read`` REQUIRE the lock of the plant file.

    Args:
        path: The path of the plant file.
        plants: A descriptor of the plant file.
    """

    def __init__(self, path: Path, plants: int) -> None:
        status = os.fstat(plants)
        self._like = status
        self._path = index_path(path, '-synced')
        self._end = UNKNOWN
        self._open()

    def _open(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            self._fd = new_file(self._path, self._like)
            write(self._fd, bytes(2 * SIZE), 0)  # not later, when the disk may be full

    def read(self) -> tuple[int, int]:
        """Return the synced end, or ``UNKNOWN``, and the length of a failed write."""
        if not os.fstat(self._fd).st_nlink:  # it was removed: tell the others again
            os.close(self._fd)
            self._open()
            self.note_end(self._end)
        return _parse(os.pread(self._fd, 2 * SIZE, 0), self._like.st_ino)

    def note_end(self, end: int) -> None:
        """Note a synced end. Of two processes the slower may note a lower end."""
        self._end = max(end, self._end)
        self._note(0, self._end)

    def note_failure(self, length: int) -> None:
        """Note the length of a write that failed; 0 after one that did not."""
        self._note(SIZE, length)

    def _note(self, offset: int, value: int) -> None:
        data = RECORD.pack(self._like.st_ino, value, 0)
        data = RECORD.pack(self._like.st_ino, value, zlib.crc32(data))
        with suppress(OSError):  # a full disk: it says less, and nothing wrong
            write(self._fd, data, offset)

    def close(self) -> None:
        os.close(self._fd)


def read_synced(path: Path, plants: int) -> int:
    """Return the synced end of a plant file, or ``UNKNOWN``; nothing is made."""
    with suppress(OSError):
        data = index_path(path, '-synced').read_bytes()
        return _parse(data, os.fstat(plants).st_ino)[0]
    return UNKNOWN


def _parse(data: bytes, inode: int) -> tuple[int, int]:
    values = [UNKNOWN, UNKNOWN]
    for number, offset in enumerate((0, SIZE)):
        with suppress(struct.error):
            owner, value, crc = RECORD.unpack_from(data, offset)
            if owner == inode and crc == zlib.crc32(RECORD.pack(owner, value, 0)):
                values[number] = value
    return values[0], max(values[1], 0)
