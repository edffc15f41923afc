"""``/metrics``: what it reports of one process; several are in ``tests/serving``."""

import pytest
from exchange import parse_samples
from test_contract import FERN, faulty_store

from store import __version__

FOR_METRICS = 'Bearer for-metrics'


@pytest.fixture
def client(serve, store):
    """Return a client, with the token for plants, of an application with metrics."""
    return serve(store, metrics_token='for-metrics')


def read_samples(client):
    """Return the samples that a client reads, from name and labels to value."""
    answer = client.get('/metrics', headers={'Authorization': FOR_METRICS})
    assert answer.content_type == 'text/plain'
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for sample in parse_samples(answer.text)
    }


def request_sample(samples, route='/plants', *, suffix='count', **labels):
    """Return the sample of requests with a method, route, status and error value."""
    labels = {'method': 'POST', 'route': route, 'status': '200', 'error': '0', **labels}
    name = f'plants_request_seconds_{suffix}'
    return samples.get((name, *sorted(labels.items())))


def test_requests_are_counted_by_method_route_status_and_error(client):
    """Each combination has a count; unknown paths share one, and unknown methods."""
    client.lint = False
    for method in ('BREW', 'PUT', 'get', 'WEBSOCKET'):
        client.request('/plants', method=method)
    for _ in range(3):
        client.add(FERN)
    client.add(FERN | {'name': 'Moss'})
    client.add(FERN, authorization='Bearer wrong')
    client.head('/livez')
    for number in range(5):
        client.get(f'/no/such/path/{number}')
    samples = read_samples(client)
    assert request_sample(samples) == 3
    assert request_sample(samples, status='400', error='40006') == 1
    assert request_sample(samples, '', status='401', error='40101') == 1
    unknown = {'method': 'GET', 'status': '404', 'error': '40400'}
    assert request_sample(samples, '', **unknown) == 5
    assert request_sample(samples, '/livez', method='HEAD') == 1
    assert request_sample(samples, status='405', error='40500', method='other') == 4
    assert not [text for text in ('path/1', 'BREW') if text in str(samples)]
    assert 0 < request_sample(samples, suffix='sum') < 10
    assert request_sample(samples, suffix='bucket', le='10.0') == 3


def test_readiness_of_the_store_and_version_are_reported(client, serve):
    """Whatever the store raises, it is not ready."""
    assert read_samples(client)['plants_store_ready',] == 1
    client = serve(faulty_store(RuntimeError()), metrics_token='for-metrics')
    samples = read_samples(client)
    assert samples['plants_store_ready',] == 0
    assert samples['plant_store_build_info', ('version', __version__)] == 1
