"""Waiting for threads, processes and conditions, for a limited time."""

import multiprocessing
import os
import threading
import time

# Seconds after which a test assumes that something hangs; more on a busy machine.
PATIENCE = float(os.environ.get('PATIENCE', '60'))
FORK = multiprocessing.get_context('fork')


def in_threads(*jobs):
    """Run functions at once, each in a thread; fail if one fails or hangs."""
    failures = []

    def run(job):
        try:
            job()
        except BaseException as ex:
            failures.append(ex)

    # Daemons, so that a thread that hangs fails its test and not the whole run.
    threads = [threading.Thread(target=run, args=[job], daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    # A failure first: others may hang because of it.
    wait_until(lambda: failures or not any(map(threading.Thread.is_alive, threads)))
    if failures:
        raise failures[0]


def wait_until(condition, what='it holds', seconds=PATIENCE):
    """Call a function until it returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (outcome := condition()):
        assert time.monotonic() < deadline, f'{what}: not within {seconds:g} s'
        time.sleep(0.002)
    return outcome
