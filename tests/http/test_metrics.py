"""``/metrics``: what it reports of one process."""

import pytest
from conftest import Client
from exchange import assert_error, parse_samples
from test_contract import FERN, faulty_store

from store import Plant, StoreUnavailable, __version__, open_store

REQUESTS = 'plants_request_seconds'


@pytest.fixture
def client(serve, store):
    """Return a client, with the token, of an application with metrics."""
    return serve(store, metrics=True)


def read_samples(client):
    """Return the samples that a client reads, from name and labels to value."""
    answer = client.get('/metrics')
    assert answer.content_type == 'text/plain'
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for sample in parse_samples(answer.text)
    }


def request_sample(samples, route='/plants', *, suffix='count', **labels):
    """Return the sample of requests with a method, route, status and error value."""
    labels = {'method': 'POST', 'route': route, 'status': '200', 'error': '0', **labels}
    return samples.get((f'{REQUESTS}_{suffix}', *sorted(labels.items())))


def test_requests_are_counted_by_method_route_status_and_error(client):
    """Each combination has a count; unknown paths share one, and unknown methods."""
    client.lint = False
    for method in ('BREW', 'PUT', 'get', 'WEBSOCKET'):
        client.request('/plants', method=method)
    for _ in range(3):
        client.add(FERN)
    client.add(FERN | {'name': 'Moss'})
    client.add(FERN, authorization='Bearer wrong')
    client.get('/livez')
    client.head('/livez')
    for number in range(5):
        client.get(f'/no/such/path/{number}')
    samples = read_samples(client)
    assert request_sample(samples) == 3
    assert request_sample(samples, status='400', error='40006') == 1
    assert request_sample(samples, '', status='401', error='40101') == 1
    unknown = {'method': 'GET', 'status': '404', 'error': '40400'}
    assert request_sample(samples, '', **unknown) == 5
    for method in ('GET', 'HEAD'):
        assert request_sample(samples, '/livez', method=method) == 1
    assert request_sample(samples, '/metrics', method='GET') is None
    assert request_sample(read_samples(client), '/metrics', method='GET') == 1
    assert request_sample(samples, status='405', error='40500', method='other') == 4
    assert not [text for text in ('path/1', 'BREW') if text in str(samples)]


def test_durations_are_counted_in_buckets(client, serve, store):
    """Each application counts in buckets from half a millisecond to ten seconds."""
    serve(store, metrics=True).add(FERN)  # another application
    client.add(FERN)
    samples = read_samples(client)
    bounds = [
        float(dict(labels)['le'])
        for name, *labels in samples
        if name == f'{REQUESTS}_bucket' and ('route', '/plants') in labels
    ]
    assert (bounds[0], bounds[-2], bounds[-1]) == (0.0005, 10, float('inf'))
    assert request_sample(samples, suffix='bucket', le='10.0') == 1
    assert 0 < request_sample(samples, suffix='sum') < 10


def test_requests_in_progress_are_counted(client, store):
    """A request counts until it is answered or fails; the scrape itself is one."""
    counts = []

    def add(plant):
        counts.append(read_samples(client)['plants_requests_in_progress',])
        raise RuntimeError

    store.add = add
    assert_error(client.add(FERN), 50000)
    counts.append(read_samples(client)['plants_requests_in_progress',])
    assert counts == [2, 1]


def test_syncs_are_counted(serve, tmp_path):
    """The syncs of a store are counted, with their time and plants."""
    with open_store(f'jsonl:{tmp_path}/plants.jsonl') as store:
        client = serve(store, metrics=True)
        assert read_samples(client)['plants_store_sync_seconds_count',] == 0
        client.add(FERN)
        store.add(Plant(2, 'Moss'))
        client.add(FERN | {'id': 2})
        samples = read_samples(client)
    for name in ('sync_seconds_count', 'batch_plants_count', 'batch_plants_sum'):
        assert samples[f'plants_store_{name}',] == 2
    assert 0 < samples['plants_store_sync_seconds_sum',] < 10
    for name, bound in (('sync_seconds', '0.0001'), ('batch_plants', '256.0')):
        assert (f'plants_store_{name}_bucket', ('le', bound)) in samples


@pytest.mark.parametrize('fault', [None, StoreUnavailable('full'), RuntimeError()])
def test_readiness_of_the_store_is_reported(fault, serve):
    """The store is ready or not; version, CPU time, memory and files are measured."""
    samples = read_samples(serve(faulty_store(fault), metrics=True))
    assert samples['plants_store_ready',] == (fault is None)
    assert samples['plant_store_build_info', ('version', __version__)] == 1
    for name in ('cpu_seconds_total', 'resident_memory_bytes', 'open_fds'):
        assert samples[f'process_{name}',] > 0


def test_metrics_need_the_token(client, anonymous, serve, store):
    """Without a token /metrics is 401; where metrics are off it is 404."""
    assert_error(anonymous.get('/metrics'), 40100)
    assert_error(client.post('/metrics'), 40500)
    assert client.head('/metrics').status_code == 200
    off = serve(store)
    assert_error(off.get('/metrics'), 40400)
    assert_error(Client(off.app).get('/metrics'), 40100)
