"""The file store in forked processes: what they inherit, and what they never use."""

import os
import random
from contextlib import suppress
from functools import partial

import pytest
from contract import FORK, at_once
from disk import Disk, append, assert_raise, assert_stored, installed, lines, raw_plants
from waiting import wait_until

from store import IdTaken, Plant, StoreCorrupt, StoreUnavailable, forks, open_store
from store.jsonl.repair import Verified, verify

pytestmark = pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')

PLANTS = [Plant(number, 'Fern') for number in range(1, 5)]
MANY = [Plant(number, 'Moss' * 50) for number in range(100, 1_000)]
IVY, OAK = Plant(9, 'Ivy'), Plant(10, 'Oak')
in_child = partial(at_once, FORK.Process)


@pytest.fixture
def store(path):
    """Return a store as a server has it: loaded by a master, in use by its workers."""
    append(path, lines(*PLANTS, *MANY))
    with open_store(f'jsonl:{path}', create=False) as store:
        store.load()
        yield store


def bytes_read(path, use):
    """Return how many bytes of the plant file a use reads, in this process."""
    sizes = []
    with installed(Disk(path)) as disk:
        disk.before = lambda name, *it: sizes.append(it[1]) if name == 'pread' else None
        use()
    return sum(sizes)


def test_child_goes_on_with_what_was_loaded(path, store):
    """It reads only what was appended since, and mends the end."""

    def look(most):
        assert bytes_read(path, store.ping) < most
        assert_stored(store, [*PLANTS, MANY[0], MANY[-1]])

    in_child(partial(look, 5_000))
    append(path, b'{"id":')
    # An opening also writes again what nobody has synced since the load.
    in_child(partial(look, 500_000))
    assert path.with_name(f'{path.name}.torn-1').read_bytes() == b'{"id":'


# Another line, a line less, another file with the same content.
CHANGES = {
    'line': lambda path, content: path.write_bytes(content[:-3] + b'x"}\n'),
    'less': lambda path, content: path.write_bytes(content[: -len(lines(MANY[-1]))]),
    'file': lambda path, content: (path.rename(f'{path}-'), path.write_bytes(content)),
}


@pytest.mark.parametrize('change', CHANGES.values(), ids=CHANGES)
def test_child_believes_only_what_fits(path, store, change):
    """If the file is another one, an add is refused until a reload reads it anew."""
    change(path, path.read_bytes())
    content = path.read_bytes()
    refused = partial(assert_raise, StoreUnavailable, partial(store.add, IVY))
    in_child(refused, refused)
    assert path.read_bytes() == content
    reloaded = open_store(f'jsonl:{path}', create=False)
    reloaded.load()
    in_child(refused, lambda: reloaded.add(IVY))
    assert path.read_bytes() == content + lines(IVY)


def test_child_writes_no_file_that_was_there_meanwhile(path, store):
    """A copy that it has opened, before the file that was loaded is put back."""
    content = path.read_bytes()

    def access(*arguments, **how):  # the file is open, and not yet looked at
        if away.exists():
            away.rename(path)
        return True

    def add():
        with installed(Disk(path)) as disk:
            disk.access = access
            assert_raise(StoreUnavailable, partial(store.add, IVY), match='replaced')
        away.exists() and away.rename(path)
        assert store.add(OAK)

    away = path.rename(path.with_name('away'))
    path.write_bytes(content)
    in_child(add)
    assert path.read_bytes() == content + lines(OAK)


@pytest.mark.parametrize('others', [b'', lines(IVY)])
def test_what_another_worker_synced_is_known(path, store, others):
    """A worker refuses a file that lacks what another one, now gone, knew as synced."""
    loaded = path.stat().st_size
    append(path, others)
    in_child(lambda: store.add(IVY))
    os.truncate(path, loaded)
    add = partial(store.add, OAK)
    in_child(lambda: assert_raise(StoreUnavailable, add, match='cut short'))
    reloaded = open_store(f'jsonl:{path}', create=False)  # it accepts the loss
    reloaded.load()
    in_child(lambda: assert_raise(StoreUnavailable, add, match='cut short'))
    in_child(lambda: assert_stored(reloaded, PLANTS, free=[IVY.id]))


def test_child_compares_many_new_lines_with_what_was_loaded(path):
    """A line of another program with a taken id is found, also in a file that grew."""
    append(path, lines(IVY))
    with open_store(f'jsonl:{path}') as store:
        store.load()
        append(path, lines(IVY._replace(name='Oak')) + (b' ' * 2**20 + b'\n') * 2)
        in_child(lambda: assert_raise(StoreCorrupt, store.ping))


@pytest.mark.parametrize('call', ['open', 'pwrite'])
def test_killed_parent_leaves_no_lock(path, call):
    """A parent that is killed in the lock leaves none to a child that does nothing.

    Nor to a child that is forked as soon as the parent has opened the file.
    """
    append(path, lines(IVY))
    reader, writer = os.pipe()

    def fork():
        if not os.fork():
            os.close(writer)
            os.read(reader, 1)  # until the test has ended
            os._exit(0)

    def open_and_fork(*arguments):
        del disk.open  # only the first time
        fd = disk.open(*arguments)
        fork()
        return fd

    def die(name, *arguments):
        if name == 'pwrite' and lines(OAK) in arguments:
            if call == 'pwrite':
                fork()
            os._exit(0)

    if not (parent := os.fork()):
        with installed(Disk(path)) as disk, open_store(f'jsonl:{path}') as store:
            disk.before = die
            if call == 'open':
                disk.open = open_and_fork
            store.add(OAK)
        os._exit(1)
    os.close(reader)
    assert os.waitpid(parent, 0)[1] == 0
    with open(writer), open_store(f'jsonl:{path}') as store:
        assert store.add(PLANTS[1])


def test_two_threads_fork_at_once(path):
    """A child of either keeps no file. An interrupt may cost the begin of a fork."""
    opens = []

    def open_one():
        opens.append(os.open(path, os.O_RDONLY))
        if len(opens) == 2:
            forks._end()
        return opens[-1]

    append(path, lines(IVY))
    for step in forks._end, forks._begin, forks._begin, forks._end:
        step()
    forks.opened(open_one).close()
    assert len(opens) == 3


def test_killed_writers_keep_acknowledged_plants(path, tmp_path, store):
    """Wherever processes are killed: nothing is lost, and no id is given twice.

    Some go on with what their parent has loaded, as workers of a server do.
    """
    told = tmp_path / 'told'

    def work(number):
        chance = random.Random(number)
        own = store if number % 2 else open_store(f'jsonl:{path}')
        with told.open('ab', 0) as file:
            while True:
                plant = Plant(chance.randrange(9000), f'{number}', 'x' * 900)
                with suppress(StoreUnavailable, IdTaken):
                    own.add(plant)
                    file.write(lines(plant))

    for first in range(0, 16, 4):
        writers = [FORK.Process(target=work, args=[first + it]) for it in range(4)]
        for writer in writers:
            writer.start()
        most = 20_000 * (1 + first // 4)
        wait_until(lambda most=most: told.exists() and told.stat().st_size > most)
        for writer in writers:
            writer.kill()
            writer.join()
    open_store(f'jsonl:{path}').load()  # which mends what the last one left
    stored = raw_plants(path.read_bytes())
    assert len({plant.id for plant in stored}) == len(stored)
    assert {*raw_plants(told.read_bytes())} <= {*stored}
    assert verify(path) == Verified(len(stored))
