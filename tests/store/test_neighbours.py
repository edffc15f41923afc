"""Several processes on one plant file: killed, stopped, and each other's servers.

The tests read the file without the store.
"""

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest
from disk import lines, raw_plants
from exchange import Load
from server import Server
from waiting import FORK, wait_until

from store import IdTaken, Plant, StoreUnavailable, open_store
from store.jsonl.repair import Verified, verify


def add_for_ever(path, name, told):
    """Add random plants in a process; tell a file of each that is acknowledged."""
    chance = random.Random(name)
    with open_store(f'jsonl:{path}', create=False) as store, told.open('ab', 0) as file:
        while True:
            plant = Plant(chance.randrange(3000), name, 'x' * chance.randrange(900))
            with suppress(StoreUnavailable, IdTaken):
                store.add(plant)
                file.write(lines(plant))
                if chance.random() < 0.02:
                    store.load(wait=chance.random() < 0.5)


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_processes_that_are_killed_and_stopped(tmp_path, path):
    """Whatever happens to them: nothing acknowledged is lost, no id given twice."""
    path.touch()
    chance, running = random.Random(0), []

    def start(number):
        arguments = path, f'{number}', tmp_path / f'told-{number}'
        running.append(FORK.Process(target=add_for_ever, args=arguments, daemon=True))
        running[-1].start()

    for number in range(4):
        start(number)
    for number in range(4, 40):
        time.sleep(chance.uniform(0, 0.03))
        stopped, killed = chance.sample(running, 2)
        os.kill(stopped.pid, signal.SIGSTOP)
        os.kill(killed.pid, signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(stopped.pid, signal.SIGCONT)
        running.remove(killed)
        start(number)

    def told():
        # The last line may be torn.
        parts = (it.read_bytes().rpartition(b'\n') for it in tmp_path.glob('told-*'))
        return raw_plants(b''.join(line + feed for line, feed, _ in parts))

    wait_until(lambda: len(told()) > 500)
    for process in running:
        process.kill()
        process.join()
    open_store(f'jsonl:{path}').load()  # which mends what the last one left
    stored = raw_plants(path.read_bytes())
    assert len({plant.id for plant in stored}) == len(stored)
    assert {*told()} <= {*stored}
    assert verify(path) == Verified(len(stored))


def test_killed_workers_beside_another_server(tmp_path, path):
    """Whenever a worker or a server is killed, what was answered is stored once."""
    acknowledged = []
    homes = tmp_path / 'one', tmp_path / 'two'
    for home in homes:
        home.mkdir()
    one, two = (Server(home, workers=2, PLANTS_STORE=f'jsonl:{path}') for home in homes)
    with one, two, Load(two, acknowledged, repeats=True) as other:
        for number in range(4):
            with Load(one, acknowledged, repeats=True) as crowd:
                crowd.wait_for_all()
                if number < 3:
                    os.kill(min(one.worker_pids()), signal.SIGKILL)
                else:
                    os.killpg(one.pid, signal.SIGKILL)
                    one.wait()
                    one.start()
                crowd.wait_for_all()
                other.wait_for_all()
    found = Counter(raw_plants(path.read_bytes()))
    sent = Counter(Plant(**plant) for plant in acknowledged)
    # NOTE: not the counters: pytest would print thousands of plants.
    assert list(sent - found) == [], 'lost'
    assert list(found - sent) == [], 'twice, or not as sent'
