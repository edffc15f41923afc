"""Python on Linux, without what it has not on macOS. Put this directory in PYTHONPATH.

Each F_FULLFSYNC (only this makes a disk of a Mac write its cache; its number is from
``<sys/fcntl.h>``) is noted in the file MACOS_SYNCS: inode and size; fsync, with -1.
Names that modules lack are found by ``mypy --platform darwin``, too.
"""

import errno
import fcntl
import os

F_FULLFSYNC = 51
fcntl_on_linux, fsync_on_linux, stat = fcntl.fcntl, os.fsync, os.stat


def note(fd, size):
    """Note a sync of a file."""
    log = os.open(os.environ['MACOS_SYNCS'], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, b'%d %d\n' % (os.fstat(fd).st_ino, size))
    os.close(log)


def control(fd, command, *arguments):
    """Do what ``fcntl.fcntl`` does, F_FULLFSYNC included."""
    if command != F_FULLFSYNC:
        return fcntl_on_linux(fd, command, *arguments)
    note(fd, os.fstat(fd).st_size)
    return fsync_on_linux(fd)


def stat_without_shm(path, **options):
    """Do what ``os.stat`` does, without /dev/shm."""
    if path.__class__ is not int and os.fspath(path) == '/dev/shm':
        raise FileNotFoundError(errno.ENOENT, 'No such file or directory', path)
    return stat(path, **options)


del os.fdatasync, os.sched_getaffinity, os.memfd_create, os.posix_fallocate
os.stat = stat_without_shm
os.fsync = lambda fd: note(fd if isinstance(fd, int) else fd.fileno(), -1)
fcntl.fcntl, fcntl.F_FULLFSYNC = control, F_FULLFSYNC
