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
    _run(threads)
    if failures:  # first: others may hang because of it
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), 'a thread hangs'


def in_child(*jobs):
    """Run functions at once, each in a forked child; fail if one fails or hangs."""

    def run(job):
        job()
        os._exit(0)  # without waiting for the threads that a store has left

    children = [FORK.Process(target=run, args=[job]) for job in jobs]
    _run(children)
    for child in children:
        child.kill()  # if it hangs
        child.join()
    assert not any(child.exitcode for child in children), 'a child failed, or hangs'


def _run(workers):
    """Start threads or processes, and wait until they end, for a limited time."""
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0, deadline - time.monotonic()))


def wait_until(condition, what='it holds', seconds=PATIENCE):
    """Call a function until it returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (outcome := condition()):
        assert time.monotonic() < deadline, f'{what}: not within {seconds:g} s'
        time.sleep(0.002)
    return outcome
