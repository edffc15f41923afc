"""Agents that wrap Falcon from outside: OpenTelemetry's and Datadog's."""

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from exchange import ORIGIN, assert_error, fern
from server import GUNICORN, Server, finished, request, wait_until
from test_requests import FAULTS

PACKAGES = (
    *('opentelemetry-distro==0.66b1', 'opentelemetry-instrumentation-falcon==0.66b1'),
    'ddtrace==4.16.0',
)
# A worker answers 500 for a tag, so that there is one of each status.
FAILING = [
    'from store.jsonl import JSONLinesStore',
    'add = JSONLinesStore.add',
    'JSONLinesStore.add = lambda self, x: add(self, x) if x.tag != "500" else 1 / 0',
    'import falcon',
    'print("wrapped by", type(falcon.App.__init__).__name__, flush=True)',
]


@pytest.fixture(scope='module')
def agents():
    """The environment with the agents beside our own, which is made once."""
    directory = Path(sys.prefix) / 'agents'
    python, stamp = directory / 'bin/python', directory / ' '.join(PACKAGES)
    pip = [python, '-m', 'pip', 'install', '--quiet', '--retries=1', '--timeout=10']
    try:
        with open(f'{directory}.lock', 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.exists():
                venv = [sys.executable, '-m', 'venv', '--clear', directory]
                for command in venv, [*pip, *PACKAGES]:
                    finished(command, check=True, timeout=300)
                stamp.touch()
    except (OSError, subprocess.SubprocessError) as ex:
        why = (getattr(ex, 'stderr', '') or str(ex)).strip().splitlines()[-1]
        pytest.skip(f'the agents need an environment of their own: {why}')
    return directory / 'bin'


def test_each_status_is_the_same_under_agents(tmp_path, agents):
    """Answers have the status, the body and the headers that they have without."""
    off = 'DD_INSTRUMENTATION_TELEMETRY_ENABLED', 'DD_REMOTE_CONFIGURATION_ENABLED'
    settings = dict.fromkeys(('OTEL_METRICS_EXPORTER', 'OTEL_LOGS_EXPORTER'), 'none')
    settings |= dict.fromkeys(off, 'false') | {'OTEL_TRACES_EXPORTER': 'console'}
    libraries = sysconfig.get_path('purelib')
    settings |= {'PYTHONPATH': libraries, 'PLANTS_CORS_ORIGINS': ORIGIN}
    command = [agents / 'opentelemetry-instrument', agents / 'ddtrace-run']
    command += [agents / 'python', *GUNICORN[1:]]
    plant = fern()
    preflight = {'origin': ORIGIN, 'access_control_request_method': 'POST'}
    faults = [*FAULTS.values(), (40006, request(body=plant | {'name': 'Moss'}))]
    faults += [(50000, request(body=fern(tag='500')))]
    with Server(tmp_path, command=command, conf=FAILING, **settings) as server:
        answer = server.ask(request(body=plant))
        assert (answer.status, answer.json) == (200, {'name': 'Fern'})
        for value, data in faults:
            assert_error(server.ask(data), value)
        answer = server.ask(request('OPTIONS', authorization=None, **preflight))
        assert answer.status in (200, 204)
        assert answer.headers['access-control-allow-origin'] == ORIGIN
        (tmp_path / 'plants.jsonl').unlink()
        assert_error(server.ask(request(body=fern())), 50300)
        assert_error(server.ask(request('GET', '/readyz')), 50300)
        # What only an agent prints that has found Falcon.
        for word in ('"http.target": "/plants"', 'wrapped by BoundFunctionWrapper'):
            wait_until(lambda word=word: word in server.log, 'it has seen requests')
