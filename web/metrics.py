"""Metrics for Prometheus at ``/metrics``: sums over the processes of a server."""

import mmap
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import Array, Structure, c_char, c_double, sizeof
from itertools import accumulate, takewhile
from threading import Lock

from falcon import Response
from prometheus_client import CONTENT_TYPE_LATEST, core, generate_latest

from store import PlantStore, __version__, forks
from web.documents import ReadOnlyResource
from web.middleware import PlantsRequest
from web.tokens import Tokens

# Clients may send any number of other methods, and of paths, so neither is a label.
_METHODS = {'GET', 'HEAD', 'OPTIONS', 'POST'}
_LABELS = 'method', 'status', 'error', 'route'
# Upper bounds of buckets: a quick disk syncs in 0.1 ms, and a request may take 10 s.
_SECONDS = [a * 10.0**b for b in range(-4, 1) for a in (1, 2.5, 5)] + [10.0]
_HISTOGRAMS: dict[str, tuple[str, list[float], tuple[str, ...]]] = {
    'plants_request_seconds': ('Seconds to answer a request.', _SECONDS, _LABELS),
    'plants_store_sync_seconds': ('Seconds of a sync.', _SECONDS, ()),
    'plants_store_batch_plants': ('Plants of a sync.', [2.0**n for n in range(9)], ()),
}


class _Row(Structure):  # name and labels; the sum, and how many are in each bucket
    _fields_ = (('key', c_char * 112), ('numbers', c_double * 18))


_Table = _Row * 256  # of a process; there are fewer combinations of labels


class Metrics(ReadOnlyResource):
    """Middleware and resource: measure requests and answer ``/metrics``."""

    def __init__(
        self, store: PlantStore, tokens: Tokens, ready: Callable[[], object]
    ) -> None:
        super().__init__(lambda: generate_latest(self), CONTENT_TYPE_LATEST)
        self._tables: Array[Array[_Row]] = (_Table * 1)()  # a child has a copy
        self._tokens, self._ready = tokens, ready
        self._locks: defaultdict[int, Lock] = defaultdict(Lock)  # a child has its own
        self._rows: dict[tuple[object, ...], _Row] = {}  # that this process has used
        self.number = 0  # of the table of this process; no other living one has it
        self._on_sync = store.on_sync or (lambda *_: None)  # others may count, too
        store.on_sync = self._observe_sync

    def share(self, served: 'Metrics | None') -> None:
        """Share memory with up to 255 children: that of ``served``, or new memory."""
        # No file: it may be left behind, and ends a worker where there is no room.
        new = (_Table * 256).from_buffer(mmap.mmap(-1, 256 * sizeof(_Table)))
        self._tables = served._tables if served else new

    def process_response(self, req: PlantsRequest, resp: Response, *_: object) -> None:
        method = req.method if req.method in _METHODS else 'other'
        labels = method, resp.status_code, req.error, req.uri_template or ''
        self._add(time.perf_counter() - req.began, 'plants_request_seconds', *labels)

    def _observe_sync(self, plants: int, seconds: float) -> None:
        self._on_sync(plants, seconds)
        self._add(plants, 'plants_store_batch_plants')
        self._add(seconds, 'plants_store_sync_seconds')

    def _add(self, amount: float, name: str, *labels: object) -> None:
        place = self.number, name, *labels
        with self._locks[forks.generation]:
            if not (row := self._rows.get(place)):
                key = '\n'.join(map(str, place[1:])).encode()[:112]
                table = self._tables[self.number % len(self._tables)]
                row = next((row for row in table if row.key in (key, b'')), _Row())
                row.key, self._rows[place] = key, row
            row.numbers[0] += amount
            row.numbers[1 + bisect_left(_HISTOGRAMS[name][1], amount)] += 1

    def collect(self) -> Iterator[core.Metric]:
        """Yield the sums over all processes, and what is looked up now."""
        sums: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0] * 18)
        for table in self._tables:
            for row in takewhile(lambda row: row.key, table):
                key = tuple(row.key.decode().split('\n'))
                sums[key] = [a + b for a, b in zip(sums[key], row.numbers, strict=True)]
        for name, (help, bounds, labels) in _HISTOGRAMS.items():
            family = core.HistogramMetricFamily(name, help, labels=labels)
            limits = [*map(str, bounds), '+Inf']
            for key in [key for key in sums if key[0] == name] if labels else [(name,)]:
                total, *counts = sums[key]
                family.add_metric(key[1:], [*zip(limits, accumulate(counts))], total)
            yield family
        failures = 'plants_token_reload_failures', 'Changes that broke a tokens file.'
        yield core.CounterMetricFamily(*failures, self._tokens.failures[0])
        help = 'Version of the plant store; the value is always 1.'
        yield core.InfoMetricFamily('plant_store_build', help, {'version': __version__})
        ready = False
        with suppress(Exception):  # /readyz reports the reason
            self._ready()
            ready = True
        yield core.GaugeMetricFamily('plants_store_ready', 'Whether adds work.', ready)
