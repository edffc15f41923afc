"""Metrics for Prometheus at ``/metrics``, of one process or of several.

Several processes use the multi-process mode of ``prometheus_client``: each has files in
a directory, and each answer adds these up. With process ids in the file names, each
restart would add files. A process therefore takes the smallest number that no living
process has, and goes on with the counters of one that has ended.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path

import prometheus_client as prometheus
from falcon import Response
from prometheus_client import multiprocess, values
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

from store import PlantStore, __version__
from web.documents import ReadOnlyResource
from web.request import PlantsRequest
from web.tokens import Tokens

# The values of the label ``method``; clients may send any number of other methods.
_METHODS = {'GET', 'HEAD', 'OPTIONS', 'POST'}
# Upper bounds of the histogram buckets, in seconds.
_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)


class Metrics(ReadOnlyResource):
    """Middleware and resource: measure requests and answer ``/metrics``."""

    def __init__(
        self, store: PlantStore, tokens: Tokens, directory: Path | None
    ) -> None:
        self._store = store
        self._directory = directory
        self._meters: _Meters | None = None
        self._making = threading.Lock()
        self._registry = prometheus.CollectorRegistry()
        read = partial(prometheus.generate_latest, self._registry)
        super().__init__(read, prometheus.CONTENT_TYPE_LATEST)
        self._registry.register(self)  # first: it removes gauges of ended processes
        if directory:
            multiprocess.MultiProcessCollector(self._registry, directory)  # type: ignore[no-untyped-call]
        else:
            prometheus.ProcessCollector(registry=self._registry)
        store.on_sync = self._observe_sync
        tokens.on_failed_reload = lambda: self._measured().failed_reloads.inc()

    def _measured(self) -> '_Meters':
        """Return the meters of this process, made at their first use: after a fork."""
        if self._meters is None:
            with self._making:
                self._meters = self._meters or _Meters(self._registry, self._directory)
        return self._meters

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        self._measured().in_progress.inc()

    def process_response(self, req: PlantsRequest, resp: Response, *_: object) -> None:
        meters = self._measured()
        meters.in_progress.dec()
        method = req.method if req.method in _METHODS else 'other'
        # Not the path: clients may send any number of unknown paths.
        route = req.uri_template or ''
        requests = meters.requests(method, route, resp.status_code, req.error)
        requests.observe(time.perf_counter() - req.began)

    def _observe_sync(self, plants: int, seconds: float) -> None:
        self._measured().batches.observe(plants)
        self._measured().syncs.observe(seconds)

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
        if self._directory:
            yield from _process_metrics(self._directory)


def _process_metrics(directory: Path) -> Iterator[prometheus.Metric]:
    """Yield CPU time and memory of each process; remove gauges of those that ended."""
    families: dict[str, prometheus.Metric] = {}
    for path in directory.glob('*.pid'):
        with path.open() as file:
            with suppress(BlockingIOError):  # it lives
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                multiprocess.mark_process_dead(path.stem, directory)  # type: ignore[no-untyped-call]
                continue
            pid = partial(int, file.read() or 0)
        for one in prometheus.ProcessCollector(pid=pid, registry=None).collect():
            label = {'process': path.stem}
            samples = [sample._replace(labels=label) for sample in one.samples]
            one.samples = []
            families.setdefault(one.name, one).samples += samples
    yield from families.values()


def _join(directory: Path) -> None:
    """Reserve a number for this process, by a lock that it holds until it ends."""
    for number in count():
        file = os.open(directory / f'{number}.pid', os.O_WRONLY | os.O_CREAT)
        with suppress(BlockingIOError):  # a living process has this number
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        os.close(file)
    os.write(file, b'%-10d' % os.getpid())
    multiprocess.mark_process_dead(number, directory)  # type: ignore[no-untyped-call]
    os.environ['PROMETHEUS_MULTIPROC_DIR'] = str(directory)
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]


class _Meters:
    """What one process counts."""

    def __init__(
        self, registry: prometheus.CollectorRegistry | None, directory: Path | None
    ) -> None:
        if directory:
            _join(directory)
            registry = None  # MultiProcessCollector reports the files
        histogram = partial(prometheus.Histogram, registry=registry)
        requests = histogram(
            'plants_request_seconds',
            'Seconds from the head of a request to its answer.',
            ['method', 'route', 'status', 'error'],
            buckets=_SECONDS,
        )
        # NOTE: labels() costs more than observe(), so what it returns is kept.
        self.requests = cache(requests.labels)
        self.in_progress = prometheus.Gauge(
            'plants_requests_in_progress',
            'Requests that are being answered.',
            multiprocess_mode='livesum',
            registry=registry,
        )
        self.syncs = histogram(
            'plants_store_sync_seconds',
            'Seconds that the store took to sync a batch of plants.',
            buckets=(0.0001, 0.00025, *_SECONDS),
        )
        self.batches = histogram(
            'plants_store_batch_plants',
            'Plants that were synced together.',
            buckets=[2**power for power in range(9)],
        )
        self.failed_reloads = prometheus.Counter(
            'plants_token_reload_failures',
            'How often a changed tokens file could not be used.',
            registry=registry,
        )
