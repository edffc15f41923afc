"""Metrics for Prometheus at ``/metrics``, of one process or of several.

With PROMETHEUS_MULTIPROC_DIR in the environment, before ``prometheus_client`` is
imported, its multi-process mode adds up the values of all workers; see ``share``.
"""

import atexit
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Any, cast

import prometheus_client as prometheus
from falcon import Response
from prometheus_client import values
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from store import PlantStore, __version__
from web.documents import ReadOnlyResource
from web.middleware import PlantsRequest
from web.tokens import Tokens

COUNTERS = 'PROMETHEUS_MULTIPROC_DIR'
_LABELS = 'method', 'route', 'status', 'error'
# The values of the label ``method``; clients may send any number of other methods.
_METHODS = {'GET', 'HEAD', 'OPTIONS', 'POST'}
# Upper bounds of buckets: a quick disk syncs in 0.1 ms, and a request may take 10 s.
_SECONDS = [step * 10**power for power in range(-4, 1) for step in (1, 2.5, 5)] + [10]
_PLANTS = [2**power for power in range(9)]
# Bytes of the files of a process: 250 combinations of labels, more than there are.
_SIZES = {'counter': 2**12, 'histogram': 2**20}
log = logging.getLogger('plants')
_shares = False  # whether share() was called, and has found room
_merge: Any = MultiProcessCollector.merge


class Metrics(ReadOnlyResource):
    """Middleware and resource: measure requests and answer ``/metrics``."""

    def __init__(self, store: PlantStore, tokens: Tokens) -> None:
        super().__init__(self._render, prometheus.CONTENT_TYPE_LATEST)
        if not os.path.isdir(os.environ.get(COUNTERS, '/')):
            raise ValueError(f'{COUNTERS}: it names no directory: correct or unset it')
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
        self._failures = prometheus.Counter(name, help, registry=registry)
        # Other applications may count the same.
        self._on_sync, self._on_failure = store.on_sync, tokens.on_failed_reload
        store.on_sync, tokens.on_failed_reload = self._observe_sync, self._count_failure

    def process_response(self, req: PlantsRequest, resp: Response, *_: object) -> None:
        if _number() is not None:
            method = req.method if req.method in _METHODS else 'other'
            # Not the path: clients may send any number of unknown paths.
            route = req.uri_template or ''
            requests = self._requests(method, route, resp.status_code, req.error)
            requests.observe(time.perf_counter() - req.began)

    def _observe_sync(self, plants: int, seconds: float) -> None:
        if self._on_sync:
            self._on_sync(plants, seconds)
        if _number() is not None:
            self._batches.observe(plants)
            self._syncs.observe(seconds)

    def _count_failure(self) -> None:
        self._on_failure()
        if _number() is not None:
            self._failures.inc()

    def _render(self) -> bytes:
        registry = prometheus.CollectorRegistry()
        registry.register(self)
        if COUNTERS not in os.environ:
            registry.register(self._registry)
        return prometheus.generate_latest(registry)

    def collect(self) -> Iterator[prometheus.Metric]:
        """Yield the metrics of all processes, and those that are looked up now."""
        if COUNTERS in os.environ:
            files = Path(os.environ[COUNTERS]).glob('*.db')
            yield from _merge(filter(_is_sound, files))
        help = 'Version of the plant store; the value is always 1.'
        yield InfoMetricFamily('plant_store_build', help, {'version': __version__})
        ready = False
        with suppress(Exception):  # /readyz reports the reason
            self._store.ping()
            ready = True
        help = 'Whether the store can take plants now: 1 or 0.'
        yield GaugeMetricFamily('plants_store_ready', help, ready)


def share(parent: str | None) -> None:
    """Have this process and its children count in files of one directory.

    It is removed at the end, or after a kill by the next process that calls this.
    """
    global _shares
    if _number.cache_info().currsize:  # at a reload
        Path(os.environ.get(COUNTERS, '/')).mkdir(0o700, exist_ok=True)
        return
    for left in Path(parent or tempfile.gettempdir()).glob('plants-*/0'):
        with suppress(OSError):  # it is in use, or another user's
            os.close(_lock(left))
            rmtree(left.parent)
    if COUNTERS not in os.environ:
        place = os.environ[COUNTERS] = tempfile.mkdtemp(prefix='plants-', dir=parent)
        pid = os.getpid()  # no worker removes it
        atexit.register(lambda: rmtree(place, True) if os.getpid() == pid else None)
    elif not os.path.isdir(os.environ[COUNTERS]):
        return  # ``Metrics`` refuses it
    _shares, make = True, cast(Any, values.MultiProcessValue)
    values.ValueClass = make(_number)
    if _number() is None:  # each process reports its own, until a reload finds room
        del os.environ[COUNTERS]
        _shares, values.ValueClass = False, values.MutexValue
        _number.cache_clear()


def _lock(path: Path) -> int:
    """Lock a file until this process, and each child that it has forked, has ended."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


@cache
def _number() -> int | None:
    """Return the number of the files of this process; ``None`` if there is no room.

    No other living process has it. A worker goes on with the files of a dead one, so
    there are few. They are written whole: if the disk is full later, a new counter in a
    sparse file would end the process (SIGBUS).
    """
    if not _shares:
        return 0
    place, number = Path(os.environ[COUNTERS]), 0
    try:
        for number in count():
            with suppress(BlockingIOError):
                _lock(place / f'{number}')
                break
        for kind, size in _SIZES.items():
            path = place / f'{kind}_{number}.db'
            if not (path.exists() and _is_sound(path)):
                new = path.with_suffix('.new')  # until it is whole nobody can read it
                new.write_bytes(bytes(size))
                new.rename(path)
    except OSError as ex:
        log.warning('no room for the metrics of this process: %s', ex)
        for path in place.glob(f'*_{number}.new'):
            path.unlink()
        return None
    return number


os.register_at_fork(after_in_child=_number.cache_clear)


def _is_sound(path: Path) -> bool:
    """Whether the package can read a file; another program may have written it."""
    with suppress(Exception):
        _merge([path])
        return True
    return False
