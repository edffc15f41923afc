"""Metrics for Prometheus at ``/metrics``, of one process or of several."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from falcon import Response

from store import PlantStore, __version__
from web.request import PlantsRequest
from web.tokens import Tokens

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Histogram, Metric

# The values of the label ``method``; clients may send any number of other methods.
_METHODS = {'GET', 'HEAD', 'OPTIONS', 'POST'}
# The bounds of the buckets of times, in seconds.
_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)


class Processes:
    """Several processes that serve one application and measure together.

    This is the multi-process mode of ``prometheus_client``: each process keeps its
    values in files of a directory, and each answer adds them up. Usually the files are
    named after process ids, so that each new process adds files for good. Here they are
    named by the smallest number that no living process has: a new process goes on with
    the counters of one that has ended.

    Args:
        directory: For these files alone; empty at first.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = str(directory)

    def join(self) -> None:
        """Take a number, in the process that counts; a lock holds it until its end."""
        from prometheus_client import multiprocess, values

        for number in count():
            self._file = Path(self.directory, f'{number}.pid').open('a+')  # noqa: SIM115
            with suppress(BlockingIOError):  # a living process has this number
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            self._file.close()
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        multiprocess.mark_process_dead(number, self.directory)  # type: ignore[no-untyped-call]
        os.environ['PROMETHEUS_MULTIPROC_DIR'] = self.directory
        values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]

    def living(self) -> Iterator[tuple[str, int]]:
        """Yield number and process id of each process; forget gauges of the others."""
        from prometheus_client import multiprocess

        for path in Path(self.directory).glob('*.pid'):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield path.stem, int(file.read() or 0)
                else:
                    multiprocess.mark_process_dead(path.stem, self.directory)  # type: ignore[no-untyped-call]


class Metrics:
    """Middleware and resource: measure requests and answer ``/metrics``.

    Args:
        store: The store whose syncs and readiness are reported.
        tokens: The tokens whose failed reloads are counted.
        processes: The processes that are reported; by default only this one.
    """

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
        self._processes = processes
        self._meters: _Meters | None = None
        self._making = threading.Lock()
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)  # before the other: it forgets gauges
        if processes:
            MultiProcessCollector(self._registry, processes.directory)  # type: ignore[no-untyped-call]
        store.on_sync = self._observe_sync
        tokens.observe_failed_reloads(lambda: self._measured().failed_reloads.inc())

    def _measured(self) -> _Meters:
        """Return what this process measures; made at its first use, so after a fork."""
        if self._meters is None:
            with self._making:
                self._meters = self._meters or _Meters(self._registry, self._processes)
        return self._meters

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        self._measured().in_progress.inc()

    def process_response(
        self, req: PlantsRequest, resp: Response, resource: object, succeeded: bool
    ) -> None:
        meters = self._measured()
        meters.in_progress.dec()
        labels = (
            req.method if req.method in _METHODS else 'other',
            # Not the path: clients may send any number of unknown paths.
            req.uri_template or '',
            resp.status_code,
            req.context.error,
        )
        series = meters.series.get(labels)
        if series is None:
            series = meters.series[labels] = meters.requests.labels(*labels)
        series.observe(time.perf_counter() - req.context.began)

    def on_get(self, req: PlantsRequest, resp: Response) -> None:
        resp.content_type = self._prometheus.CONTENT_TYPE_LATEST
        resp.data = self._prometheus.generate_latest(self._registry)

    on_head = on_get

    def _observe_sync(self, plants: int, seconds: float) -> None:
        self._measured().batches.observe(plants)
        self._measured().syncs.observe(seconds)

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
        if self._processes is None:
            yield from collector().collect()
            return
        families: dict[str, Metric] = {}
        for number, pid in self._processes.living():
            for one in collector(pid=partial(int, pid)).collect():
                family = self._prometheus.Metric(one.name, one.documentation, one.type)
                families.setdefault(one.name, family).samples += [
                    sample._replace(labels={'process': number})
                    for sample in one.samples
                ]
        yield from families.values()


class _Meters:
    """What one process counts."""

    def __init__(
        self, registry: CollectorRegistry | None, processes: Processes | None
    ) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        if processes:
            processes.join()
            registry = None  # the collector of their files reports them
        histogram = partial(Histogram, registry=registry)
        self.requests = histogram(
            'plants_request_seconds',
            'Seconds from the head of a request to its answer.',
            ['method', 'route', 'status', 'error'],
            buckets=_SECONDS,
        )
        # NOTE: labels() costs more than observe(), so what it returns is kept.
        self.series: dict[tuple[str, str, int, int], Histogram] = {}
        self.in_progress = Gauge(
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
        self.failed_reloads = Counter(
            'plants_token_reload_failures',
            'How often a changed tokens file could not be used.',
            registry=registry,
        )
