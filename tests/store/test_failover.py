"""A failover to a PostgreSQL standby, while clients add plants."""

import itertools
import signal
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from postgresql import PostgreSQL
from proxy import Proxy
from server import Server, hurried, request, wait_until

from store.postgresql.limits import CONNECT_WITHIN

CLIENTS = 8
# Time limits in seconds, shorter than the defaults.
ANSWER_WITHIN = 1
CANCEL_WITHIN = 0.5
# Seconds until a plant is stored again, on a busy machine, by the fault of the primary.
BACK_WITHIN = {
    'killed': 3,
    'silent': ANSWER_WITHIN + CANCEL_WITHIN + CONNECT_WITHIN + 3,
}


class Client(threading.Thread):
    """Adds plants one after another, and repeats each until it is answered 200.

    Args:
        server: The server.
        place: The number of this client, from 0.

    Attributes:
        added: The acknowledged plants, each with the time of its response.
        ended: Set to end the thread after its current plant.
    """

    def __init__(self, server, place):
        super().__init__()
        self._server = server
        self._place = place
        self._connection = None
        self.added = []
        self.ended = False

    def run(self):
        with ExitStack() as opened:
            for number in itertools.count():
                id = CLIENTS * number + self._place
                body = {'id': id, 'name': f'Fern {id}', 'tag': str(self._place)}
                while (status := self._ask(opened, body)) != 200:
                    assert status in (None, 503), status
                    time.sleep(0.02)
                self.added.append((tuple(body.values()), time.monotonic()))
                if self.ended:
                    return

    def _ask(self, opened, body):
        """Return the status, or ``None`` if the connection is lost."""
        with suppress(ConnectionError):
            if self._connection is None:
                self._connection = opened.enter_context(self._server.connect())
            answer = self._connection.ask(request(body=body))
            if answer is not None:
                return answer.status
        self._connection = None
        return None


@pytest.fixture
def primary():
    """The primary server."""
    with PostgreSQL() as primary:
        yield primary


@pytest.fixture
def standby(primary):
    """A synchronous standby of the primary: every commit waits for it."""
    with PostgreSQL(primary) as standby:
        primary.configure("synchronous_standby_names = 'standby'\n")
        state = 'SELECT sync_state FROM pg_stat_replication'
        wait_until(lambda: primary.execute(state) == [('sync',)], 'it is synchronous')
        yield standby


@pytest.mark.parametrize('fault', BACK_WITHIN)
def test_failover_loses_no_acknowledged_plant(tmp_path, primary, standby, fault):
    """After a promotion the service adds to the new primary, by itself.

    The connections to a killed process are closed by its kernel. A machine without
    power is silent: its connections just stop answering.
    """
    with Proxy(primary.port) as proxy:
        hosts = f'127.0.0.1:{proxy.port},127.0.0.1:{standby.port}'
        url = f'postgresql://gardener@{hosts}/postgres'
        limits = hurried(
            tmp_path, ANSWER_WITHIN=ANSWER_WITHIN, CANCEL_WITHIN=CANCEL_WITHIN
        )
        with Server(tmp_path, *limits, workers=2, PLANTS_STORE=url) as server:
            clients = [Client(server, place) for place in range(CLIENTS)]
            for client in clients:
                client.start()
            try:
                wait_until(lambda: all(len(c.added) > 20 for c in clients), 'all add')
                if fault == 'silent':
                    proxy.stop()
                primary.stop(signal.SIGKILL)
                killed = time.monotonic()
                standby.promote()
                wait_until(standby.is_primary, 'the standby is promoted')
                promoted = time.monotonic()
                wait_until(
                    lambda: all(c.added[-1][1] > promoted for c in clients), 'all add'
                )
            finally:
                for client in clients:
                    client.ended = True
                for client in clients:
                    client.join()
            first = min(at for c in clients for _, at in c.added if at > promoted)
            print(f'{first - killed:.2f} s after the kill', end=', ')
            print(f'{first - promoted:.2f} s after the promotion')
            assert first - promoted < BACK_WITHIN[fault]
            assert server.ask(request('GET', '/readyz')).status == 200
            assert len(server.worker_pids()) == 2
            stored = standby.execute('SELECT id, name, tag FROM plants')
    answered = [plant for client in clients for plant, _ in client.added]
    assert sorted(stored) == sorted(answered)
    assert 'Traceback' not in server.log
