"""The index of a plant file: from an id to the offset of its line.

It is a file beside the plant file, mapped into the memory of every process that has
the store open, so that a start costs the same with ten plants and ten million, and no
worker holds a copy. It is disposable: only the plant file is truth, and whatever is
wrong with the index (missing, of another file, damaged, older than the last boot) is
answered by building it again.

LMDB was tried for it and left: its pages have no checksums. Of 100 copies with 20
bytes changed at random 68 answered with an error, 30 gave wrong answers, and 2 ended
the process.

The structure is extendible hashing (Fagin et al., ACM TODS 4(3), 1979): a directory
of 2**depth bucket numbers, addressed by the low bits of the id's hash, and buckets of
up to 31 entries that split in two when they are full. An id is in one bucket or
nowhere, so a look-up reads one bucket whatever the size.

The file, little-endian, in pages of 512 bytes::

    page 0       CRC-32 u32, the header (see _HEADER), which it covers
    a bucket     CRC-32 u32, depth u16, count u16, suffix u64, count entries
                 (id i64, offset u64), the rest zero; the CRC covers all the rest
    a directory  2**depth page numbers u32

**A wrong answer must be impossible, whatever happens to the bytes.** A look-up checks
the bucket's CRC, and that the bucket is the one the hash belongs to (its suffix), so a
damaged bucket, a damaged directory and a stale page all raise ``IndexDamaged``. An
offset is only a hint: its user reads the line there and compares the id.

**A process may be killed between any two stores into the map**, and the stores stay,
in order, since the pages belong to the kernel. So every change is either one bucket,
or ordered such that each prefix of it is a sound index or recognised and finished by
whoever is next (``_split``), also by the same process if a signal handler has raised
there. A power cut is another matter: pages reach the disk in any order, so after a
boot only an index that was closed cleanly is believed.

Every method REQUIRES the lock of the plant file, and is for one thread at a time.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO
from typing import NamedTuple
from typing import Protocol

PAGE = 512
CAPACITY = 31  # (512 - 16) // 16
PARTITION_BITS = 7  # of a build; a directory of 2**7 pointers is one page

_MASK = 2**64 - 1
_MAGIC = b'plants\x00\x01'
_BUCKET = struct.Struct('<HHQ')
_ENTRY = struct.Struct('<qQ')
_ID = struct.Struct('<q')
_CRC = struct.Struct('<I')
_POINTER = struct.Struct('<I')


class IndexDamaged(Exception):
    """The index cannot be believed and must be built again."""


class Identity(NamedTuple):
    """What ties an index to one plant file in one boot.

    Attributes:
        device: ``st_dev`` of the plant file.
        inode: ``st_ino`` of the plant file.
        boot: The boot's random id, 16 bytes.
    """

    device: int
    inode: int
    boot: bytes


class _Header(NamedTuple):
    """The fixed part of the index; page 0.

    Attributes:
        device, inode, boot: As in ``Identity``.
        key: Of the hash, random.
        end: The size of the plant file that is indexed, in bytes.
        tail_size, tail_crc: The length and CRC-32 of the last bytes before the end.
        closed_mtime: ``st_mtime_ns`` of the plant file at a clean close, 0 while open.
        depth: Of the directory.
        directory: The page where it begins.
        pages: How many pages are in use; the file may be longer.
        spare: A page that a split has left over, 0 for none.
        split: The page of a bucket that is being split, 0 for none.
        left, right: The pages of its two halves.
    """

    device: int
    inode: int
    boot: bytes
    key: int
    end: int
    tail_size: int
    tail_crc: int
    closed_mtime: int
    depth: int
    directory: int
    pages: int
    spare: int
    split: int
    left: int
    right: int


_HEADER = struct.Struct('<8sQQ16sQQIIQQQQQQQQ')
TAIL = 256  # bytes


class Allocator(Protocol):
    """What the index needs of the operating system; the ``os`` module has it."""

    def posix_fallocate(self, fd: int, offset: int, length: int, /) -> None: ...


class Index:
    """An open index file.

    Args:
        fd: Of the index file, open for reading and writing; the caller closes it.
        system: Where ``posix_fallocate`` is looked up.

    Raises:
        IndexDamaged: The file is not a sound index.
    """

    def __init__(self, fd: int, system: Allocator = os) -> None:
        self._fd = fd
        self._system = system
        size = os.fstat(fd).st_size
        if size < PAGE or size % PAGE:
            raise IndexDamaged('it is cut short')
        # NOTE: a store into a mapped hole of a full disk is a SIGBUS, not an error.
        # So the file has no holes: it grows by posix_fallocate, which can fail.
        self._map = _map_file(fd, size)
        self._header: _Header
        self._packed = b''
        self.refresh()

    def close(self) -> None:
        self._map.close()

    def refresh(self) -> None:
        """Take up what other processes did; call it after taking the lock.

        Raises:
            IndexDamaged: The header is damaged.
        """
        packed = self._map[: 4 + _HEADER.size]
        if packed == self._packed and not self._header.split:
            return  # nobody else was here
        magic, *fields = _HEADER.unpack_from(packed, 4)
        header = _Header._make(fields)
        if packed != _pack_header(header) or magic != _MAGIC:
            raise IndexDamaged('its header is damaged')
        if header.pages * PAGE > len(self._map):
            size = os.fstat(self._fd).st_size
            if header.pages * PAGE > size:
                raise IndexDamaged('it is cut short')
            self._map_again(size)
        self._header = header
        self._packed = packed
        if header.split:
            self._finish_split()

    @property
    def end(self) -> int:
        """The size of the plant file that is indexed, in bytes."""
        return self._header.end

    def distrust(self, identity: Identity, plants: BinaryIO) -> str | None:
        """Return why the index is not to be believed for a plant file, or ``None``.

        Args:
            identity: Of the plant file.
            plants: The plant file.
        """
        header = self._header
        status = os.fstat(plants.fileno())
        if (header.device, header.inode) != identity[:2]:
            return 'it is of another file'
        if header.closed_mtime and header.closed_mtime != status.st_mtime_ns:
            return 'the plant file was changed since'
        if not header.closed_mtime and header.boot != identity.boot:
            return 'it was not closed before the machine went down'
        if header.end > status.st_size:
            return 'the plant file was cut short'
        try:
            self.check_tail(plants)
        except IndexDamaged as ex:
            return str(ex)
        return None

    def check_tail(self, plants: BinaryIO) -> None:
        """Compare what is before the end with what was there when it was indexed.

        The inode number of a file that was removed is soon given to another; and a file
        that was cut short may have grown again since.

        Raises:
            IndexDamaged: It is something else.
        """
        header = self._header
        plants.seek(header.end - header.tail_size)
        if zlib.crc32(plants.read(header.tail_size)) != header.tail_crc:
            raise IndexDamaged('it is of another file')

    def retire(self) -> None:
        """Have every process that uses this index, now or later, find it damaged."""
        self._map[: 4 + _HEADER.size] = bytes(4 + _HEADER.size)

    def advance(self, end: int, tail: bytes) -> None:
        """Record that the plant file is indexed up to an offset.

        Args:
            end: The offset.
            tail: The bytes just before it, any number of them.
        """
        tail = tail[-TAIL:]
        self._write_header(
            self._header._replace(
                end=end, tail_size=len(tail), tail_crc=zlib.crc32(tail)
            )
        )

    def mark_open(self, boot: bytes) -> None:
        """Record, durably, that changes follow which are not synced."""
        self._write_header(self._header._replace(boot=boot, closed_mtime=0))
        self._map.flush(0, mmap.PAGESIZE)

    def mark_closed(self, mtime: int) -> None:
        """Make the index durable, then record that it may be believed after a boot."""
        self._map.flush()
        self._write_header(self._header._replace(closed_mtime=mtime))
        self._map.flush(0, mmap.PAGESIZE)

    def get(self, id: int) -> int | None:
        """Return the offset where an id's line should be, or ``None``.

        Raises:
            IndexDamaged: The bucket cannot be believed.
        """
        _, page = self._bucket_of(self._hash(id))
        at = _find(page, _ID.pack(id))
        return None if at < 0 else int(_ENTRY.unpack_from(page, at)[1])

    def reserve(self, count: int) -> None:
        """Make sure that so many puts find room, so that they cannot fail.

        Raises:
            OSError: The disk is full; the index is unchanged.
        """
        # Each put may split its bucket, which takes two pages, and now and then
        # doubles the directory.
        directory = (_POINTER.size << self._header.depth) // PAGE + 1
        self._grow(self._header.pages + 2 * count + 2 * directory)

    def put(self, id: int, offset: int) -> None:
        """Enter an id, or give it another offset. REQUIRES: a reserve for it.

        Raises:
            IndexDamaged: The bucket cannot be believed.
        """
        hash = self._hash(id)
        key = _ID.pack(id)
        entry = _ENTRY.pack(id, offset)
        while True:
            number, page = self._bucket_of(hash)
            depth, count, suffix = _BUCKET.unpack_from(page, 4)
            at = _find(page, key)
            if at < 0 and count < CAPACITY:
                at = 16 + 16 * count
                count += 1
            if at >= 0:
                entries = page[16:at] + entry + page[at + 16 : 16 + 16 * count]
                self._write_page(number, _bucket(depth, suffix, entries))
                return
            self._split(number, page)

    def _hash(self, id: int) -> int:
        return _hash(id, self._header.key)

    def _bucket_of(self, hash: int) -> tuple[int, bytes]:
        """Return the number and the bytes of the bucket that a hash belongs to."""
        header = self._header
        slot = hash & ((1 << header.depth) - 1)
        at = header.directory * PAGE + slot * _POINTER.size
        number: int = _POINTER.unpack_from(self._map, at)[0]
        if not 0 < number < header.pages:
            raise IndexDamaged('its directory is damaged')
        page = self._map[number * PAGE : (number + 1) * PAGE]
        if _CRC.unpack_from(page)[0] != zlib.crc32(page[4:]):
            raise IndexDamaged('a bucket is damaged')
        depth, count, suffix = _BUCKET.unpack_from(page, 4)
        if count > CAPACITY or hash & ((1 << depth) - 1) != suffix:
            raise IndexDamaged('its directory is damaged')
        return number, page

    def _write_page(self, number: int, page: bytes) -> None:
        self._map[number * PAGE : (number + 1) * PAGE] = page

    def _write_header(self, header: _Header) -> None:
        packed = _pack_header(header)
        self._map[: 4 + _HEADER.size] = packed
        self._header = header
        self._packed = packed  # last: until then a refresh reads what was written

    def _grow(self, pages: int) -> None:
        size = pages * PAGE
        if size <= len(self._map):
            return
        # By an eighth, so that growing is rare, or on a disk that is nearly full by as
        # little as will do.
        generous = _whole_pages(max(size, len(self._map) * 9 // 8))
        try:
            self._system.posix_fallocate(self._fd, 0, generous)
        except OSError:
            self._system.posix_fallocate(self._fd, 0, _whole_pages(size))
        self._map_again(os.fstat(self._fd).st_size)

    def _map_again(self, size: int) -> None:
        old = self._map
        self._map = _map_file(self._fd, size)  # if it fails the old one still serves
        old.close()

    def _split(self, number: int, page: bytes) -> None:
        """Replace a full bucket by two, with one more bit of the hash each.

        The halves go to pages that nothing points to; then the header says what is
        under way; then the pointers turn. A process that dies before the header is
        written has changed nothing. One that dies after it leaves ``split`` behind,
        and whoever comes next turns the pointers again, to the same values.
        """
        depth, count, suffix = _BUCKET.unpack_from(page, 4)
        if depth == self._header.depth:
            self._double_directory()
        self._grow(self._header.pages + 2)  # there is room, if ids are at all scattered
        header = self._header
        bit = 1 << depth
        halves = [bytearray(), bytearray()]
        for at in range(16, 16 + 16 * count, 16):
            id = _ID.unpack_from(page, at)[0]
            halves[bool(self._hash(id) & bit)] += page[at : at + 16]
        left = header.spare or header.pages
        right = header.pages + (not header.spare)
        self._write_page(left, _bucket(depth + 1, suffix, halves[0]))
        self._write_page(right, _bucket(depth + 1, suffix | bit, halves[1]))
        self._write_header(
            header._replace(
                pages=right + 1, spare=0, split=number, left=left, right=right
            )
        )
        self._finish_split()

    def _finish_split(self) -> None:
        """Turn the pointers from a split bucket to its halves, however many do."""
        header = self._header
        page = self._map[header.left * PAGE : (header.left + 1) * PAGE]
        depth, _, suffix = _BUCKET.unpack_from(page, 4)
        if _CRC.unpack_from(page)[0] != zlib.crc32(page[4:]) or not (
            0 < depth <= header.depth
        ):
            raise IndexDamaged('a bucket is damaged')  # pragma: no cover - just then
        for slot in range(suffix, 1 << header.depth, 1 << (depth - 1)):
            half = header.right if slot & (1 << (depth - 1)) else header.left
            at = header.directory * PAGE + slot * _POINTER.size
            self._map[at : at + 4] = _POINTER.pack(half)
        # Wiped, so that a damaged pointer to it cannot find a sound old bucket.
        self._write_page(header.split, bytes(PAGE))
        self._write_header(
            header._replace(spare=header.split, split=0, left=0, right=0)
        )

    def _double_directory(self) -> None:
        """Give the directory one more bit; the header's store is the switch."""
        header = self._header
        size = _POINTER.size << header.depth
        pages = 2 * size // PAGE
        self._grow(header.pages + pages)
        at = header.directory * PAGE
        pointers = self._map[at : at + size]
        at = header.pages * PAGE
        self._map[at : at + 2 * size] = pointers + pointers
        self._write_header(
            header._replace(
                depth=header.depth + 1,
                directory=header.pages,
                pages=header.pages + pages,
            )
        )


def build(
    path: Path,
    identity: Identity,
    entries: Iterable[tuple[int, int]],
    system: Allocator = os,
) -> list[tuple[int, int]]:
    """Write an index of many entries at once, twenty times as fast as by put.

    Args:
        path: Where; an old file is overwritten.
        identity: Of the plant file.
        entries: Ids and offsets, in the order of the file.
        system: Where ``posix_fallocate`` is looked up.

    Returns:
        The entries whose id had come before, which are not in the index.

    Raises:
        OSError: The disk is full, for example.
    """
    key = random.SystemRandom().getrandbits(64)
    # One pass deals the entries out to partitions of the slots, the second makes the
    # buckets of one partition after the other: everything in order, nothing at random.
    partitions = [array('q') for _ in range(1 << PARTITION_BITS)]
    mask = len(partitions) - 1
    for id, offset in entries:
        partition = partitions[_hash(id, key) & mask]
        partition.append(id)
        partition.append(offset)
    count = sum(map(len, partitions)) // 2
    # Two thirds full on the average, where a Poisson spread leaves few over-full.
    depth = max(PARTITION_BITS, (count // 20).bit_length())
    return _write(path, identity, partitions, depth, key, system)


def _write(
    path: Path,
    identity: Identity,
    partitions: list[array[int]],
    depth: int,
    key: int,
    system: Allocator,
) -> list[tuple[int, int]]:
    slots = 1 << depth
    bits = (len(partitions) - 1).bit_length()
    directory_pages = slots * _POINTER.size // PAGE
    header = _Header(
        device=identity.device,
        inode=identity.inode,
        boot=identity.boot,
        key=key,
        end=0,
        tail_size=0,
        tail_crc=0,
        closed_mtime=0,
        depth=depth,
        directory=1,
        pages=1 + directory_pages + slots,
        spare=0,
        split=0,
        left=0,
        right=0,
    )
    repeated = []
    left_over = []
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        size = _whole_pages(header.pages * PAGE)
        system.posix_fallocate(fd, 0, size)
        with mmap.mmap(fd, size) as map:
            map[: 4 + _HEADER.size] = _pack_header(header)
            first = 1 + directory_pages
            pointers = array('I', range(first, first + slots))
            map[PAGE : PAGE + slots * _POINTER.size] = pointers.tobytes()
            for number, partition in enumerate(partitions):
                buckets: list[dict[int, int]] = [{} for _ in range(slots >> bits)]
                for at in range(0, len(partition), 2):
                    id = partition[at]
                    bucket = buckets[(_hash(id, key) & (slots - 1)) >> bits]
                    if id in bucket:
                        repeated.append((id, partition[at + 1]))
                    else:
                        bucket[id] = partition[at + 1]
                for high, bucket in enumerate(buckets):
                    slot = high << bits | number
                    pairs = list(bucket.items())
                    left_over += pairs[CAPACITY:]
                    page = b''.join([_ENTRY.pack(*pair) for pair in pairs[:CAPACITY]])
                    at = (first + slot) * PAGE
                    map[at : at + PAGE] = _bucket(depth, slot, page)
                partitions[number] = array('q')  # give the memory back
        index = Index(fd, system)
        for id, offset in left_over:
            index.reserve(1)
            index.put(id, offset)
        index.close()
    finally:
        os.close(fd)
    return repeated


def _hash(id: int, key: int) -> int:
    # The finalizer of MurmurHash3 (public domain): every bit of the id changes every
    # bit of the hash, so that no pattern of ids crowds a bucket.
    hash = (id ^ key) & _MASK
    hash = ((hash ^ (hash >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    hash = ((hash ^ (hash >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return hash ^ (hash >> 33)


def _whole_pages(size: int) -> int:
    """Round up to memory pages, so that a map ends where its file does."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _map_file(fd: int, size: int) -> mmap.mmap:
    map = mmap.mmap(fd, size)
    # Ids are spread over all of it: to read or map the neighbours too, as the kernel
    # does by itself, costs sixteen times the memory and helps nobody.
    map.madvise(mmap.MADV_RANDOM)
    return map


def _bucket(depth: int, suffix: int, entries: bytes | bytearray) -> bytes:
    body = _BUCKET.pack(depth, len(entries) // 16, suffix) + entries
    body = body.ljust(PAGE - 4, b'\0')
    return _CRC.pack(zlib.crc32(body)) + body


def _pack_header(header: _Header) -> bytes:
    body = _HEADER.pack(_MAGIC, *header)
    return _CRC.pack(zlib.crc32(body)) + body


def _find(page: bytes, key: bytes) -> int:
    """Return where in a bucket the entry of a packed id begins, or -1."""
    (count,) = struct.unpack_from('<H', page, 6)
    end = 16 + 16 * count
    at = page.find(key, 16, end)
    while at >= 0 and at % 16:  # it straddles entries: look further
        at = page.find(key, at + 1, end)
    return at
