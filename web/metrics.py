"""Metrics for Prometheus at ``/metrics``, of one process or of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from falcon import Response

from store import PlantStore, __version__
from web.request import PlantsRequest
from web.tokens import Tokens

if TYPE_CHECKING:
    from prometheus_client import Histogram, Metric

# The values of the label ``method``; clients may send any number of other methods.
_METHODS = {'GET', 'HEAD', 'OPTIONS', 'POST'}


@dataclass(frozen=True)
class Processes:
    """Several processes that serve one application and measure together.

    Before their parent makes the application it switches ``prometheus_client`` to
    multi-process mode: it sets ``PROMETHEUS_MULTIPROC_DIR`` and
    ``prometheus_client.values.ValueClass``.

    Attributes:
        directory: Where each process keeps its values: ``PROMETHEUS_MULTIPROC_DIR``.
        pids: Returns the process ids by process name, the label ``process``. New
            processes should reuse the names of old ones, so that series stay few.
    """

    directory: str
    pids: Callable[[], Mapping[str, int]]


class Metrics:
    """Middleware and resource: measure requests and answer ``/metrics``.

    Args:
        store: The store whose syncs and readiness are reported.
        tokens: The tokens whose failed reloads are counted.
        processes: The processes that are reported; by default only this one.
    """

    SECONDS = (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
        *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    )

    def __init__(
        self, store: PlantStore, tokens: Tokens, processes: Processes | None = None
    ) -> None:
        # NOTE: imported here, because it is slow and only metrics need it. Not later: a
        # worker that runs as another user may not be able to read the packages.
        import prometheus_client
        import prometheus_client.core
        from prometheus_client.multiprocess import MultiProcessCollector

        self._prometheus = prometheus_client
        self._store = store
        self._pids = processes.pids if processes else None
        registry = self._scraped = prometheus_client.CollectorRegistry()
        if processes:
            self._scraped = prometheus_client.CollectorRegistry()
            MultiProcessCollector(self._scraped, processes.directory)  # type: ignore[no-untyped-call]
        histogram = partial(prometheus_client.Histogram, registry=registry)
        self._requests = histogram(
            'plants_request_seconds',
            'Seconds from the head of a request to its answer.',
            ['method', 'route', 'status', 'error'],
            buckets=self.SECONDS,
        )
        # NOTE: labels() costs more than observe(), so what it returns is kept.
        self._series: dict[tuple[str, str, int, int], Histogram] = {}
        self._in_progress = prometheus_client.Gauge(
            'plants_requests_in_progress',
            'Requests that are being answered.',
            multiprocess_mode='livesum',
            registry=registry,
        )
        self._syncs = histogram(
            'plants_store_sync_seconds',
            'Seconds that the store took to sync a batch of plants.',
            buckets=(0.0001, 0.00025, *self.SECONDS),
        )
        self._batches = histogram(
            'plants_store_batch_plants',
            'Plants that were synced together.',
            buckets=[2**power for power in range(9)],
        )
        failed_reloads = prometheus_client.Counter(
            'plants_token_reload_failures',
            'How often a changed tokens file could not be used.',
            registry=registry,
        )
        store.on_sync = self._observe_sync
        tokens.observe_failed_reloads(failed_reloads.inc)
        self._scraped.register(self)

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        self._in_progress.inc()

    def process_response(
        self, req: PlantsRequest, resp: Response, resource: object, succeeded: bool
    ) -> None:
        self._in_progress.dec()
        labels = (
            req.method if req.method in _METHODS else 'other',
            # Not the path: clients may send any number of unknown paths.
            req.uri_template or '',
            resp.status_code,
            req.context.error,
        )
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = self._requests.labels(*labels)
        series.observe(time.perf_counter() - req.context.began)

    def on_get(self, req: PlantsRequest, resp: Response) -> None:
        resp.content_type = self._prometheus.CONTENT_TYPE_LATEST
        resp.data = self._prometheus.generate_latest(self._scraped)

    on_head = on_get

    def _observe_sync(self, plants: int, seconds: float) -> None:
        self._batches.observe(plants)
        self._syncs.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics whose values are looked up for each answer."""
        gauge = self._prometheus.core.GaugeMetricFamily
        build = gauge(
            'plant_store_build_info',
            'Version of the plant store; the value is always 1.',
            labels=['version'],
        )
        build.add_metric([__version__], 1)
        yield build
        ready = False
        with suppress(Exception):  # /readyz reports the reason
            self._store.ping()
            ready = True
        meaning = 'Whether the store can take plants now: 1 or 0.'
        yield gauge('plants_store_ready', meaning, ready)
        yield from self._process_metrics()

    def _process_metrics(self) -> Iterator[Metric]:
        """Yield CPU time, memory and open files of each process."""
        collector = partial(self._prometheus.ProcessCollector, registry=None)
        if self._pids is None:
            yield from collector().collect()
            return
        families: dict[str, Metric] = {}
        for name, pid in self._pids().items():
            for one in collector(pid=partial(int, pid)).collect():
                family = families.setdefault(
                    one.name,
                    self._prometheus.Metric(one.name, one.documentation, one.type),
                )
                family.samples += [
                    sample._replace(labels={'process': name}) for sample in one.samples
                ]
        yield from families.values()
