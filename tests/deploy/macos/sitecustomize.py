"""Python on Linux, without what it has not on macOS. Put this directory in PYTHONPATH.

What is simulated, and where each fact is from:

* the names that a module lacks: the stubs of Python (typeshed). These are those for
  which a program has another way; ``mypy --platform darwin`` finds the use of any;
* ``F_FULLFSYNC``: its number is from ``<sys/fcntl.h>``, and fsync(2) of macOS says that
  only this makes a disk write its cache. In ``MACOS_SYNCS``, a file, each is noted: the
  inode and the size of the file when it began. So is each ``fsync``, with size -1;
* open files: the limit is 256 and "unlimited", and setrlimit(2) of macOS refuses more
  than ``OPEN_MAX``, 10,240 in ``<sys/syslimits.h>``;
* there is no ``/proc`` and no ``/dev/shm``.

Only Python is simulated: libraries in C, such as gevent's event loop and SQLite, use
the system as they do on Linux.
"""

import builtins
import errno
import fcntl
import functools
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import types

LACKING = {
    os: 'copy_file_range fdatasync memfd_create pidfd_open pipe2 posix_fadvise '
    'posix_fallocate sched_getaffinity sched_setaffinity splice '
    'O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_TMPFILE',
    fcntl: 'F_ADD_SEALS F_GETPIPE_SZ F_NOTIFY F_SETPIPE_SZ',
    resource: 'prlimit RUSAGE_THREAD',
    select: 'epoll EPOLLIN EPOLLOUT EPOLLEXCLUSIVE POLLRDHUP',
    signal: 'pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPOLL',
    socket: 'SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED SO_PASSCRED TCP_INFO '
    'TCP_DEFER_ACCEPT TCP_USER_TIMEOUT TCP_QUICKACK AF_NETLINK',
}
ABSENT = re.compile('/proc(/|$)|/dev/shm/?$')  # tests have files in /dev/shm
TAKES_A_PATH = 'access', 'chdir', 'listdir', 'lstat', 'open', 'readlink', 'scandir'
TAKES_A_PATH += 'stat', 'statvfs'
F_FULLFSYNC, OPEN_MAX = 51, 10_240


def without_files_of_linux(function):
    """Return a function for which the directories of Linux do not exist."""

    @functools.wraps(function)
    def call(path='.', *arguments, **options):
        if isinstance(path, str | os.PathLike) and ABSENT.match(os.fspath(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *arguments, **options)

    return call


def note(fd, size):
    """Note a sync of a file."""
    text = json.dumps([os.fstat(fd).st_ino, size]) + '\n'
    log = os.open(os.environ['MACOS_SYNCS'], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, text.encode())
    os.close(log)


def fsync(file):
    """Sync a file, without the cache of its disk."""
    fd = file if isinstance(file, int) else file.fileno()
    note(fd, -1)
    sync(fd)


def control(fd, command, *arguments):
    """Do what ``fcntl.fcntl`` does, F_FULLFSYNC included."""
    if command != F_FULLFSYNC:
        return fcntl_on_linux(fd, command, *arguments)
    size = os.fstat(fd).st_size
    sync(fd)
    note(fd, size)
    return 0


def getrlimit(which):
    """Return what macOS has at a start."""
    return limits.get(which) or getrlimit_on_linux(which)


def setrlimit(which, new):
    """Refuse what macOS refuses."""
    if which == resource.RLIMIT_NOFILE:
        if not 0 <= new[0] <= OPEN_MAX:
            raise ValueError('current limit exceeds maximum limit')
        limits[which] = new
        new = new[0], getrlimit_on_linux(which)[1]
    setrlimit_on_linux(which, new)


sync, fcntl_on_linux = os.fsync, fcntl.fcntl
getrlimit_on_linux, setrlimit_on_linux = resource.getrlimit, resource.setrlimit
limits = {resource.RLIMIT_NOFILE: (256, resource.RLIM_INFINITY)}
for module, absent in LACKING.items():
    for name in vars(module).keys() & set(absent.split()):
        delattr(module, name)
    if hasattr(module, '__all__'):
        module.__all__ = [name for name in module.__all__ if hasattr(module, name)]
for name in TAKES_A_PATH:
    setattr(os, name, without_files_of_linux(getattr(os, name)))
builtins.open = without_files_of_linux(builtins.open)
os.fsync, os.process_cpu_count = fsync, os.cpu_count
fcntl.fcntl, fcntl.F_FULLFSYNC = control, F_FULLFSYNC
resource.getrlimit, resource.setrlimit = getrlimit, setrlimit
sys.platform = 'darwin'
# Where urllib asks for the proxies of the system.
sys.modules['_scproxy'] = types.ModuleType('_scproxy')
sys.modules['_scproxy']._get_proxy_settings = dict
sys.modules['_scproxy']._get_proxies = dict
