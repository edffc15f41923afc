"""Agents that wrap Falcon from outside: OpenTelemetry's and Datadog's."""

import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from exchange import assert_error, fern
from server import GUNICORN, Server, finished, request, wait_until

PACKAGES = (
    *('opentelemetry-distro==0.66b1', 'opentelemetry-instrumentation-falcon==0.66b1'),
    'ddtrace==4.16.0',
)
ORIGIN = 'https://garden.example'
# A worker answers 500 for a tag, so that there is one of each status.
FAILING = [
    'from store.jsonl import JSONLinesStore',
    'add = JSONLinesStore.add',
    'JSONLinesStore.add = lambda self, x: add(self, x) if x.tag != "500" else 1 / 0',
    'import falcon',
    'print("wrapped by", type(falcon.App.__init__).__name__)',
]


@pytest.fixture(scope='module')
def agents():
    """The environment with the agents beside our own, which is made once."""
    directory = Path(sys.prefix) / 'agents'
    try:
        lock = open(f'{directory}.lock', 'w')  # noqa: SIM115
    except OSError as ex:
        pytest.skip(f'the agents need an environment of their own: {ex}')
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = directory / ' '.join(PACKAGES).replace('/', ' ')
        if not stamp.exists():
            venv = [sys.executable, '-m', 'venv', '--clear', directory]
            pip = [directory / 'bin/python', '-m', 'pip', 'install', '--quiet']
            quick = {'PIP_RETRIES': '1', 'PIP_TIMEOUT': '10'} | os.environ
            try:
                finished(venv, check=True, timeout=300)
                finished([*pip, *PACKAGES], check=True, timeout=300, env=quick)
            except subprocess.SubprocessError as ex:
                why = (getattr(ex, 'stderr', '') or str(ex)).strip().splitlines()[-1]
                pytest.skip(f'pip cannot install the agents: {why}')
            stamp.touch()
    return directory / 'bin'


# What only an agent prints that has found Falcon.
AGENTS = {
    'opentelemetry-instrument': '"http.target": "/plants"',
    'ddtrace-run': 'wrapped by BoundFunctionWrapper',
}


@pytest.mark.parametrize('agent', AGENTS)
def test_each_status_is_the_same_under_an_agent(tmp_path, agents, agent):
    """Answers have the status, the body and the headers that they have without."""
    ours = sysconfig.get_path('purelib')
    settings = {
        'PYTHONPATH': ours,
        'PLANTS_CORS_ORIGINS': ORIGIN,
        'OTEL_TRACES_EXPORTER': 'console',
        'OTEL_METRICS_EXPORTER': 'none',
        'OTEL_LOGS_EXPORTER': 'none',
        'DD_INSTRUMENTATION_TELEMETRY_ENABLED': 'false',
        'DD_REMOTE_CONFIGURATION_ENABLED': 'false',
    }
    command = [agents / agent, agents / 'python', *GUNICORN[1:]]
    with Server(tmp_path, command=command, conf=FAILING, **settings) as server:
        plant = fern()
        answer = server.ask(request(body=plant))
        assert (answer.status, answer.json) == (200, {'name': 'Fern'})
        for value, data in {
            40006: request(body=plant | {'name': 'Moss'}),
            40004: request(body=b'{'),
            40100: request(body=plant, authorization=None),
            40101: request(body=plant, authorization='Bearer wrong'),
            40400: request('GET', '/no'),
            40500: request('PUT', '/plants'),
            50000: request(body=fern(tag='500')),
        }.items():
            assert_error(server.ask(data), value)
        preflight = {'origin': ORIGIN, 'access_control_request_method': 'POST'}
        data = request('OPTIONS', authorization=None, **preflight)
        answer = server.ask(data, head=True)
        assert answer.status in (200, 204)
        assert answer.headers['access-control-allow-origin'] == ORIGIN
        (tmp_path / 'plants.jsonl').unlink()
        assert_error(server.ask(request(body=fern())), 50300)
        assert_error(server.ask(request('GET', '/readyz')), 50300)
        assert server.ask(request('GET', '/livez')).status == 200
        server.reload()
        assert server.ask(request(body=fern())).status == 200
        wait_until(lambda: AGENTS[agent] in server.log, 'the agent has seen requests')
