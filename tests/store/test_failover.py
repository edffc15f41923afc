"""A failover to a PostgreSQL standby, while clients add plants."""

import pytest
from exchange import SHORT_DATABASE_LIMITS, Load
from postgresql import PostgreSQL, assert_refused
from proxy import Proxy
from server import Server, request, wait_until

from store import open_store

LIMITS = [*SHORT_DATABASE_LIMITS, '    connection.CONNECT_WITHIN = 0.5']
NAMES = "synchronous_standby_names = '{}'\n"


@pytest.fixture
def standby(database):
    """A synchronous standby of the server, whose commits wait for it."""
    with PostgreSQL(database) as standby:
        database.configure(NAMES.format('standby'))
        state = 'SELECT sync_state FROM pg_stat_replication'
        wait_until(lambda: database.execute(state) == [('sync',)], 'it is synchronous')
        yield standby
    database.configure(NAMES.format(''))
    database.start()


@pytest.mark.parametrize('fault', ['killed', 'silent'])
def test_failover_loses_no_acknowledged_plant(tmp_path, database, url, standby, fault):
    """A standby is only read; after a promotion the service adds to it, by itself."""
    added, copy = [], standby.own(url)
    with Proxy(database.port) as proxy:
        hosts = f':{standby.port},127.0.0.1:{proxy.port}/'
        two = url.replace(f':{database.port}/', hosts)
        with Server(tmp_path, workers=2, conf=LIMITS, PLANTS_STORE=two) as server:
            with Load(server, added, repeats=True) as crowd:
                wait_until(lambda: len(added) > 40, 'all add')
                with open_store(copy, create=False) as store:
                    wait_until(lambda: len(list(store)) > 40, 'the standby is read')
                    assert_refused('the database is read-only', store.ping)
                if fault == 'silent':  # as a machine without power
                    proxy.stop()
                database.kill()
                standby.execute('SELECT pg_promote()')  # returns when it is done
                crowd.wait_for_all()
            ready = request('GET', '/readyz')
            # Often: one worker may have served the whole crowd.
            wait_until(lambda: {server.ask(ready).status for _ in range(8)} == {200})
    expected = [(p['id'], p['name'], p.get('tag')) for p in added]
    assert sorted(standby.execute('TABLE plants', url=copy)) == sorted(expected)
    assert 'Traceback' not in server.log
