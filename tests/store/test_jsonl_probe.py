"""The readiness probe on real disks that refuse writes: it says what an add would."""

import os
import tempfile
from pathlib import Path
from pwd import getpwnam

import pytest
from server import Server, finished, installed, request, wait_until


def run(*command):
    """Run a command; return whether it has succeeded."""
    return finished(command).returncode == 0


def mount(disk):
    """Mount the ext4 file system in a file; after an error it becomes read-only."""
    image = disk.with_name('image')
    return run('mount', '-o', 'loop,errors=remount-ro', image, disk)


def unmount(disk):
    """Unmount it, as soon as the last worker of a server has ended."""
    wait_until(lambda: run('umount', disk), 'nobody uses the disk')


@pytest.fixture
def disk():
    """A small file system of its own."""
    program = installed('mke2fs', 'e2fsprogs')
    with tempfile.TemporaryDirectory() as name:
        disk = Path(name, 'disk')
        disk.mkdir()
        disk.parent.chmod(0o755)  # the server may run as another user
        with disk.with_name('image').open('wb') as image:
            image.truncate(16 * 2**20)
        assert run(program, '-q', '-t', 'ext4', image.name)
        if not mount(disk):
            pytest.skip('it needs the right to mount a file system')
        try:
            yield disk
        finally:
            unmount(disk)


def serve(disk, *options):
    """Return a server of a plant file on a disk; its log is on another."""
    store = f'jsonl:{disk}/plants.jsonl'
    return Server(disk.parent, *options, workers=2, PLANTS_STORE=store)


def assert_status(server, status, id):
    """Check that an add, and all probes before and after it, have a status."""
    probes = [request('GET', '/readyz')] * 10
    # So long that a block of the disk is needed.
    add = request(body={'id': id, 'name': 'Fern' * 2000})
    found = [server.ask(question).status for question in (*probes, add, *probes)]
    assert found == [status] * 21


def test_disk_that_becomes_read_only(disk):
    """After an error of the disk no worker is ready, also before it refuses an add."""
    device = os.stat(disk).st_dev
    block = os.path.realpath(f'/sys/dev/block/{os.major(device)}:{os.minor(device)}')
    trigger = Path('/sys/fs/ext4', os.path.basename(block), 'trigger_fs_error')
    if not trigger.exists():
        pytest.skip('this kernel cannot be told to find an error of a file system')
    with serve(disk) as server:
        assert_status(server, 200, id=1)
        trigger.write_text('1')
        assert_status(server, 503, id=2)
    unmount(disk)
    assert mount(disk)
    with serve(disk) as server:
        assert_status(server, 200, id=2)
        assert (disk / 'plants.jsonl').read_bytes().count(b'\n') == 2


@pytest.mark.parametrize(('user', 'status'), [('root', 200), ('nobody', 503)])
def test_disk_with_room_for_root_alone(disk, user, status):
    """Where only the blocks for root are left, root is ready and others are not."""
    account = getpwnam(user)
    os.chown(disk, account.pw_uid, account.pw_gid)
    with serve(disk, '--user', user, '--group', str(account.pw_gid)) as server:
        assert_status(server, 200, id=1)
        with (disk / 'other').open('wb', buffering=0) as other:
            while free := os.statvfs(disk).f_bavail:
                other.write(bytes(1024 * max(1, free // 2)))
                os.fsync(other)
        assert_status(server, status, id=2)
        (disk / 'other').unlink()
        assert_status(server, 200, id=3)
