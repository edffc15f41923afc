"""Metrics for Prometheus at ``/metrics``, of one process or of several.

With PROMETHEUS_MULTIPROC_DIR in the environment, before ``prometheus_client`` is
imported, its multi-process mode adds up the values of all workers; a server sets it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial

import prometheus_client as prometheus
from falcon import Response
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from store import PlantStore, __version__
from web.documents import ReadOnlyResource
from web.middleware import PlantsRequest
from web.tokens import Tokens

_LABELS = 'method', 'route', 'status', 'error'
# The values of the label ``method``; clients may send any number of other methods.
_METHODS = {'GET', 'HEAD', 'OPTIONS', 'POST'}
# Upper bounds of buckets: a quick disk syncs in 0.1 ms, and a request may take 10 s.
_SECONDS = [step * 10**power for power in range(-4, 1) for step in (1, 2.5, 5)] + [10]
_PLANTS = [2**power for power in range(9)]


class Metrics(ReadOnlyResource):
    """Middleware and resource: measure requests and answer ``/metrics``."""

    def __init__(self, store: PlantStore, tokens: Tokens) -> None:
        super().__init__(self._render, prometheus.CONTENT_TYPE_LATEST)
        self._store = store
        registry = self._registry = prometheus.CollectorRegistry()
        histogram = partial(prometheus.Histogram, registry=registry, buckets=_SECONDS)
        name, help = 'plants_request_seconds', 'Seconds to answer a request.'
        # NOTE: labels() costs more than observe(), so what it returns is kept.
        self._requests = cache(histogram(name, help, _LABELS).labels)
        self._syncs = histogram('plants_store_sync_seconds', 'Seconds of a sync.')
        name, help = 'plants_store_batch_plants', 'Plants that were synced together.'
        self._batches = histogram(name, help, buckets=_PLANTS)
        name, help = 'plants_token_reload_failures', 'Changes that broke a tokens file.'
        failures = prometheus.Counter(name, help, registry=registry)
        store.on_sync, tokens.on_failed_reload = self._observe_sync, failures.inc

    def process_response(self, req: PlantsRequest, resp: Response, *_: object) -> None:
        method = req.method if req.method in _METHODS else 'other'
        # Not the path: clients may send any number of unknown paths.
        route = req.uri_template or ''
        requests = self._requests(method, route, resp.status_code, req.error)
        requests.observe(time.perf_counter() - req.began)

    def _observe_sync(self, plants: int, seconds: float) -> None:
        self._batches.observe(plants)
        self._syncs.observe(seconds)

    def _render(self) -> bytes:
        registry = prometheus.CollectorRegistry()
        registry.register(self)
        if 'PROMETHEUS_MULTIPROC_DIR' in os.environ:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        else:
            registry.register(self._registry)
        return prometheus.generate_latest(registry)

    def collect(self) -> Iterator[prometheus.Metric]:
        """Yield the metrics whose values are looked up for each answer."""
        help = 'Version of the plant store; the value is always 1.'
        yield InfoMetricFamily('plant_store_build', help, {'version': __version__})
        ready = False
        with suppress(Exception):  # /readyz reports the reason
            self._store.ping()
            ready = True
        help = 'Whether the store can take plants now: 1 or 0.'
        yield GaugeMetricFamily('plants_store_ready', help, ready)
