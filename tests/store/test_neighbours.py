"""Several processes on one plant file, which are killed and stopped."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest
from disk import lines, raw_plants
from waiting import FORK, wait_until

from store import IdTaken, Plant, StoreUnavailable, open_store
from store.jsonl.repair import Verified, verify


def add_for_ever(store, name, told):
    """Add random plants in a process; tell a file of each that is acknowledged."""
    chance = random.Random(name)
    with told.open('ab', 0) as file:
        while True:
            plant = Plant(chance.randrange(3000), name, 'x' * chance.randrange(900))
            with suppress(StoreUnavailable, IdTaken):
                store.add(plant)
                file.write(lines(plant))


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_processes_that_are_killed_and_stopped(tmp_path, path):
    """Whatever happens to them: nothing acknowledged is lost, no id given twice.

    Half of them go on with what their parent has loaded, as workers of a server do.
    """
    url, chance, running = f'jsonl:{path}', random.Random(0), []
    master = open_store(url)
    master.load()
    for number in range(40):
        store = master if number % 2 else open_store(url, create=False)
        arguments = store, f'{number}', tmp_path / f'told-{number}'
        running.append(FORK.Process(target=add_for_ever, args=arguments, daemon=True))
        running[-1].start()
        if len(running) > 4:
            time.sleep(chance.uniform(0, 0.03))
            stopped, killed = chance.sample(running, 2)
            os.kill(stopped.pid, signal.SIGSTOP)
            os.kill(killed.pid, signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.01))
            os.kill(stopped.pid, signal.SIGCONT)
            running.remove(killed)

    def told():
        # The last line may be torn.
        parts = (it.read_bytes().rpartition(b'\n') for it in tmp_path.glob('told-*'))
        return raw_plants(b''.join(line + feed for line, feed, _ in parts))

    wait_until(lambda: len(told()) > 500)
    for process in running:
        process.kill()
        process.join()
    open_store(url).load()  # which mends what the last one left
    stored = raw_plants(path.read_bytes())
    assert len({plant.id for plant in stored}) == len(stored)
    assert {*told()} <= {*stored}
    assert verify(path) == Verified(len(stored))
