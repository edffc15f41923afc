"""``/metrics``: what it reports of one process; several are in ``tests/serving``."""

import os
import signal

from exchange import parse_samples
from test_contract import FERN, faulty_store

from store import __version__
from store.jsonl import JSONLinesStore
from web import metrics

# How often each combination of labels was counted.
COUNTS = {
    'error="0",method="POST",route="/plants",status="200"': 3,
    'error="40006",method="POST",route="/plants",status="400"': 1,
    'error="40101",method="POST",route="",status="401"': 1,
    'error="40400",method="GET",route="",status="404"': 5,
    'error="40500",method="other",route="/plants",status="405"': 4,
}


def read_metrics(client):
    """Return the text of ``/metrics``, in which each family is described once."""
    answer = client.get('/metrics', headers={'Authorization': 'Bearer for-metrics'})
    assert answer.content_type == 'text/plain'
    assert parse_samples(answer.text)
    return answer.text


def test_requests_are_counted_by_method_route_status_and_error(serve, store):
    """Each combination has a count; unknown paths share one, and unknown methods."""
    client = serve(store, metrics_token='for-metrics')
    client.lint = False
    for method in ('BREW', 'PUT', 'get', 'WEBSOCKET'):
        client.request('/plants', method=method)
    for _ in range(3):
        client.add(FERN)
    client.add(FERN | {'name': 'Moss'})
    client.add(FERN, authorization='Bearer wrong')
    for number in range(5):
        client.get(f'/no/such/path/{number}')
    text = read_metrics(client)
    for labels, count in COUNTS.items():
        assert f'plants_request_seconds_count{{{labels}}} {count}.0\n' in text
    assert text.count('plants_request_seconds_count{') == len(COUNTS)
    assert 'le="10.0"' in text


def test_child_of_a_host_that_counts_goes_on(serve, store, monkeypatch):
    """Another thread of the host may be counting at the moment of a fork."""
    client = serve(store, metrics_token='for-metrics')

    def fork(*_):
        monkeypatch.undo()
        if (child := os.fork()) == 0:
            signal.alarm(5)
            os._exit(client.get('/livez').status_int != 200)
        return 99 * os.waitpid(child, 0)[1]  # there is no such place

    monkeypatch.setattr(metrics, 'bisect_left', fork)
    assert client.get('/livez').status_int == 200


def test_readiness_of_the_store_and_version_are_reported(serve, store):
    """Whatever the store raises, it is not ready."""
    for one, ready in ((store, 1), (faulty_store(RuntimeError()), 0)):
        text = read_metrics(serve(one, metrics_token='for-metrics'))
        assert f'plants_store_ready {ready}.0\n' in text
        assert f'plant_store_build_info{{version="{__version__}"}} 1.0\n' in text


def test_all_applications_of_a_store_count_its_syncs(serve, path):
    """Each one that measures, and the caller of its own."""
    with JSONLinesStore(path) as store:
        calls = []
        store.on_sync = lambda plants, _: calls.append(plants)
        clients = [serve(store, metrics_token='for-metrics') for _ in range(2)]
        clients[0].add(FERN)
        for client in clients:
            assert 'plants_store_sync_seconds_count 1.0\n' in read_metrics(client)
        assert calls == [1]
