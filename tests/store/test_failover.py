"""A failover to a PostgreSQL standby, while clients add plants."""

import itertools
from contextlib import contextmanager

import pytest
from exchange import SHORT_DATABASE_LIMITS, Crowd
from postgresql import PostgreSQL, refused
from proxy import Proxy
from server import Server, configured, request, wait_until

from store import open_store


@contextmanager
def running():
    """Run a primary, and a synchronous standby: every commit waits for it."""
    with PostgreSQL() as primary, PostgreSQL(primary) as standby:
        primary.configure("synchronous_standby_names = 'standby'\n")
        state = 'SELECT sync_state FROM pg_stat_replication'
        wait_until(lambda: primary.execute(state) == [('sync',)], 'it is synchronous')
        yield primary, standby


@pytest.mark.parametrize('fault', ['killed', 'silent'])
def test_failover_loses_no_acknowledged_plant(tmp_path, fault):
    """A standby is only read; after a promotion the service adds to it, by itself."""
    with running() as (primary, standby), Proxy(primary.port) as proxy:
        hosts = f'127.0.0.1:{proxy.port},127.0.0.1:{standby.port}'
        url = f'postgresql://gardener@{hosts}/postgres'
        limits = configured(tmp_path, *SHORT_DATABASE_LIMITS)
        with Server(tmp_path, *limits, workers=2, PLANTS_STORE=url) as server:
            added = []
            with Crowd(server, added, itertools.count(1), fault) as crowd:
                wait_until(lambda: len(added) > 40, 'all add')
                with open_store(standby.url(), create=False) as store:
                    wait_until(lambda: len(list(store)) > 40, 'the standby is read')
                    with refused('the database is read-only'):
                        store.ping()
                if fault == 'silent':  # as a machine without power
                    proxy.stop()
                primary.kill()
                standby.execute('SELECT pg_promote()')  # returns when it is done
                crowd.wait_for_all()

            def all_are_ready():
                # One worker may have served all clients. The other one tries again a
                # tenth of a second after it last found no primary.
                probe = request('GET', '/readyz')
                return all(server.ask(probe).status == 200 for _ in range(8))

            wait_until(all_are_ready, 'both workers are ready')
            assert len(server.worker_pids()) == 2
            stored = standby.execute('SELECT id, name, tag FROM plants')
    expected = [(p['id'], p['name'], p.get('tag')) for p in added]
    assert sorted(stored) == sorted(expected)
    assert 'Traceback' not in server.log


def test_each_host_is_named_once(tmp_path):
    """While no primary answers the log names each host, once for each change."""
    with running() as (primary, standby), Proxy(primary.port) as proxy:
        hosts = f'127.0.0.1:{proxy.port},127.0.0.1:{standby.port}'
        url = f'postgresql://gardener@{hosts}/postgres'
        words = [f'127.0.0.1:{port}: ' for port in (proxy.port, standby.port)]

        def told(log):
            return sum(all(it in line for it in words) for line in log.splitlines())

        with Server(tmp_path, workers=1, PLANTS_STORE=url) as server:
            proxy.stop()
            ready = request('GET', '/readyz')
            short = 'the store cannot take plants now: no host takes plants'
            wait_until(lambda: server.ask(ready).json['message'] == short, 'it is told')
            for _ in range(5):
                assert server.ask(ready).status == 503
            wait_until(lambda: told(server.log) == 1, 'it is logged')
            proxy.go_on()
            wait_until(lambda: server.ask(ready).status == 200, 'it is ready')
            proxy.stop()
            wait_until(lambda: server.ask(ready) and told(server.log) == 2)
            proxy.go_on()
