"""What Prometheus is told, in a process that serves alone."""

import subprocess
import sys

import pytest
from conftest import Client
from errors import assert_error
from prometheus_client.parser import text_string_to_metric_families

from store import Plant
from store import open_store
from store.memory import MemoryStore

FERN = {'id': 1, 'name': 'Fern'}
REQUESTS = 'plants_request_seconds'


@pytest.fixture
def client(serve, store):
    """Return a client who has the token, of an application that measures."""
    return serve(store, metrics=True)


def metrics(client):
    """Return the samples, as a mapping from name and labels to value."""
    answer = client.get('/metrics')
    assert answer.status_code == 200
    assert answer.content_type == 'text/plain'
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def requests(
    samples, path='/plants', status='200', error='0', suffix='count', **labels
):
    """Return a sample of the requests that had a path, a status and an error value."""
    labels |= {'path': path, 'status': status, 'error': error}
    return samples.get((f'{REQUESTS}_{suffix}', *sorted(labels.items())))


def test_requests(client):
    """Requests are counted by the path of their route, status and error value."""
    for _ in range(3):
        client.add(FERN)
    client.add(FERN | {'name': 'Moss'})
    client.add(FERN, authorization='Bearer wrong')
    client.get('/livez')
    for number in range(5):
        client.get(f'/no/such/path/{number}')
    samples = metrics(client)
    assert requests(samples) == 3
    assert requests(samples, status='400', error='40006') == 1
    assert requests(samples, '', '401', '40101') == 1
    assert requests(samples, '', '404', '40400') == 5
    assert requests(samples, '/livez') == 1
    assert requests(samples, '/metrics') is None
    assert requests(metrics(client), '/metrics') == 1
    assert 'path/1' not in str(samples)


def test_times(client):
    """Times are counted in buckets from half a millisecond to ten seconds."""
    client.add(FERN)
    samples = metrics(client)
    bounds = [
        float(dict(labels)['le'])
        for name, *labels in samples
        if name == f'{REQUESTS}_bucket' and ('path', '/plants') in labels
    ]
    assert (bounds[0], bounds[-2], bounds[-1]) == (0.0005, 10, float('inf'))
    assert requests(samples, suffix='bucket', le='10.0') == 1
    assert 0 < requests(samples, suffix='sum') < 10


def test_syncs(serve, tmp_path):
    """The syncs of a store that has any are counted, with their time and plants."""
    with open_store(f'jsonl:{tmp_path}/plants.jsonl') as store:
        client = serve(store, metrics=True)
        assert metrics(client)['plants_store_sync_seconds_count',] == 0
        client.add(FERN)
        store.add(Plant(2, 'Moss'))
        client.add(FERN | {'id': 2})
        samples = metrics(client)
    assert samples['plants_store_sync_seconds_count',] == 2
    assert samples['plants_store_batch_plants_count',] == 2
    assert samples['plants_store_batch_plants_sum',] == 2
    assert 0 < samples['plants_store_sync_seconds_sum',] < 10


OTHER_PROCESS = """
from webtest import TestApp
from app import create_app
from store import open_store
app = TestApp(create_app(open_store('memory:'), tokens=['t'], metrics=True))
for path in ('/livez', '/livez', '/readyz'):
    app.get(path)
"""


def test_processes_that_share_a_directory(serve, tmp_path, monkeypatch):
    """Where processes share a directory each of them tells what all have counted."""
    monkeypatch.setenv('PROMETHEUS_MULTIPROC_DIR', str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, '-c', OTHER_PROCESS], timeout=60, check=True)
    samples = metrics(serve(MemoryStore(), metrics=True))
    assert requests(samples, '/livez') == 4
    assert requests(samples, '/readyz') == 2


def test_applications_are_apart(client, serve):
    """Two applications of one process count each for itself."""
    other = serve(MemoryStore(), metrics=True)
    client.add(FERN)
    assert requests(metrics(client)) == 1
    assert requests(metrics(other)) is None


def test_not_public(client, serve, store):
    """The metrics need the token; where they are off there is no such path."""
    stranger = Client(client.app)
    assert_error(stranger.get('/metrics'), 40100)
    assert_error(client.post('/metrics'), 40500)
    assert client.head('/metrics').status_code == 200
    off = serve(store)
    assert_error(off.get('/metrics'), 40400)
    assert_error(Client(off.app).get('/metrics'), 40100)


@pytest.mark.parametrize('metrics', [False, True])
def test_import(metrics):
    """The library is imported where metrics are on, and nowhere else."""
    code = f"""
import sys
from app import create_app
from store import open_store
create_app(open_store('memory:'), tokens=['t'], metrics={metrics})
sys.exit('prometheus_client' in sys.modules)
"""
    done = subprocess.run([sys.executable, '-c', code], timeout=60)
    assert done.returncode == metrics
