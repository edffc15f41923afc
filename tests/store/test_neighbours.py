"""Several processes on one plant file: killed, stopped, and each other's servers.

The tests read the file without the store.
"""

import itertools
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest
from disk import fill, lines, raw_plants
from exchange import Crowd
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
    fill(path)  # which mends what the last one left
    stored = raw_plants(path.read_bytes())
    assert len({plant.id for plant in stored}) == len(stored)
    assert {*told()} <= {*stored}
    assert verify(path) == Verified(len(stored))


def test_killed_workers_of_two_servers(tmp_path, path):
    """Whenever processes are killed, acknowledged plants are stored exactly once."""
    chance, ids, acknowledged = random.Random(0), itertools.count(1), []
    shared = {'PLANTS_STORE': f'jsonl:{path}'}
    homes = tmp_path / 'one', tmp_path / 'two'
    for home in homes:
        home.mkdir()
    # Three: one may be killed while the replacement of another still starts.
    with (
        Server(homes[0], workers=3, **shared) as one,
        Server(homes[1], **shared) as two,
    ):
        for number in range(10):
            with (
                Crowd(one, acknowledged, ids, number) as crowd,
                Crowd(two, acknowledged, ids, f'{number} of two') as other,
            ):
                time.sleep(chance.uniform(0, 0.1))
                if number % 5 == 4:
                    os.killpg(one.pid, signal.SIGKILL)
                    one.wait()
                    one.start()
                else:
                    os.kill(chance.choice(sorted(one.worker_pids())), signal.SIGKILL)
                crowd.wait_for_all()
                other.wait_for_all()
            found = Counter(raw_plants(path.read_bytes()))
            sent = Counter(Plant(**plant) for plant in acknowledged)
            # NOTE: not the counters: pytest would print thousands of plants.
            assert list(sent - found) == [], 'lost'
            assert list(found - sent) == [], 'twice, or not as sent'


# Longer than the original, so that the size alone does not reveal it.
