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
from web.request import PlantsRequest
from web.tokens import Tokens

_LABELS = 'method', 'route', 'status', 'error'
# The values of the label ``method``; clients may send any number of other methods.
_METHODS = {'GET', 'HEAD', 'OPTIONS', 'POST'}
# Upper bounds of the histogram buckets, in seconds.
_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)


class Metrics(ReadOnlyResource):
    """Middleware and resource: measure requests and answer ``/metrics``."""

    def __init__(self, store: PlantStore, tokens: Tokens) -> None:
        super().__init__(self._render, prometheus.CONTENT_TYPE_LATEST)
        self._store = store
        self._registry = registry = prometheus.CollectorRegistry()
        seconds = partial(prometheus.Histogram, registry=registry, buckets=_SECONDS)
        name, meaning = 'plants_request_seconds', 'Seconds to answer a request.'
        # NOTE: labels() costs more than observe(), so what it returns is kept.
        self._requests = cache(seconds(name, meaning, _LABELS).labels)
        name, meaning = (
            'plants_store_sync_seconds',
            'Seconds to sync a batch of plants.',
        )
        self._syncs = seconds(name, meaning)
        name, meaning = 'plants_store_batch_plants', 'Plants that were synced together.'
        powers = [2**power for power in range(9)]
        self._batches = seconds(name, meaning, buckets=powers)
        name, meaning = (
            'plants_requests_in_progress',
            'Requests that are being answered.',
        )
        self._in_progress = prometheus.Gauge(
            name, meaning, registry=registry, multiprocess_mode='livesum'
        )
        name, meaning = (
            'plants_token_reload_failures',
            'Broken changes of the tokens file.',
        )
        failed_reloads = prometheus.Counter(name, meaning, registry=registry)
        store.on_sync = self._observe_sync
        tokens.on_failed_reload = failed_reloads.inc

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        self._in_progress.inc()

    def process_response(self, req: PlantsRequest, resp: Response, *_: object) -> None:
        self._in_progress.dec()
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
        meaning = 'Version of the plant store; the value is always 1.'
        yield InfoMetricFamily('plant_store_build', meaning, {'version': __version__})
        ready = False
        with suppress(Exception):  # /readyz reports the reason
            self._store.ping()
            ready = True
        meaning = 'Whether the store can take plants now: 1 or 0.'
        yield GaugeMetricFamily('plants_store_ready', meaning, ready)
