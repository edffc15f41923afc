"""A failover to a PostgreSQL standby, while clients add plants."""

import itertools

import pytest
from exchange import SHORT_DATABASE_LIMITS, Crowd
from postgresql import PostgreSQL, refused
from proxy import Proxy
from server import Server, configured, request, wait_until

from store import Plant, open_store


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


@pytest.mark.parametrize('fault', ['killed', 'silent'])
def test_failover_loses_no_acknowledged_plant(tmp_path, primary, standby, fault):
    """After a promotion the service adds to the new primary, by itself.

    The connections to a killed process are closed by its kernel. A machine without
    power is silent: its connections just stop answering.
    """
    with Proxy(primary.port) as proxy:
        hosts = f'127.0.0.1:{proxy.port},127.0.0.1:{standby.port}'
        url = f'postgresql://gardener@{hosts}/postgres'
        limits = configured(tmp_path, *SHORT_DATABASE_LIMITS)
        with Server(tmp_path, *limits, workers=2, PLANTS_STORE=url) as server:
            added = []
            with Crowd(server, added, itertools.count(1), fault) as crowd:
                wait_until(lambda: len(added) > 40, 'all add')
                if fault == 'silent':
                    proxy.stop()
                primary.kill()
                standby.execute('SELECT pg_promote()')  # returns when it is done
                crowd.wait_for_all()
            assert server.ask(request('GET', '/readyz')).status == 200
            assert len(server.worker_pids()) == 2
            stored = standby.execute('SELECT id, name, tag FROM plants')
    expected = [(p['id'], p['name'], p.get('tag')) for p in added]
    assert sorted(stored) == sorted(expected)
    assert 'Traceback' not in server.log


def test_standby_is_read(primary, standby):
    """A standby is read, and takes no plant."""
    fern = Plant(1, 'Fern')
    with open_store(primary.url()) as store:
        store.add(fern)
    with open_store(standby.url(), create='never') as store:
        wait_until(lambda: list(store) == [fern], 'it is applied')
        with refused('the database is read-only'):
            store.ping()
