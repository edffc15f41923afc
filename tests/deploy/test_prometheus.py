"""The scrape configuration and the alerts in ``deploy/prometheus/``, run for real."""

import json
import re
import shutil
import time
from contextlib import suppress
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml
from machine import edit
from server import REPOSITORY, TOKEN, Server, finished, free_port, installed, request
from waiting import wait_until

RECIPE = REPOSITORY / 'deploy/prometheus'


@pytest.fixture
def directory(tmp_path):
    """A copy of the configuration directory, with a token."""
    shutil.copytree(RECIPE, tmp_path / 'prometheus')
    (tmp_path / 'prometheus/plants-token').write_text(f'{TOKEN}\n')
    return tmp_path / 'prometheus'


def test_configuration_is_sound_and_alerts_when_it_should(directory):
    """Promtool finds no fault, and the rules have a unit test for each alert."""
    promtool = installed('promtool', 'prometheus')
    files = list(directory.glob('*.test.yml'))
    check = ('check', 'config', '--lint-fatal', directory / 'prometheus.yml')
    for arguments in (check, ('test', 'rules', *files)):
        done = finished([promtool, *arguments])
        assert done.returncode == 0, done.stdout + done.stderr
    assert {
        rule['alertname']
        for file in files
        for test in yaml.safe_load(file.read_text())['tests']
        for rule in test['alert_rule_test']
        if 'exp_alerts' in rule
    } == {rule['alert'] for rule in rules()}


def rules():
    """Return the rules."""
    [group] = yaml.safe_load((RECIPE / 'plants.rules.yml').read_text())['groups']
    return group['rules']


class Prometheus(Server):
    """Prometheus with the configuration, over plain HTTP and with another target."""

    def __init__(self, directory, target):
        for theirs, ours in {
            'scheme: https': 'scheme: http',
            '[plants.example.org]': f'["127.0.0.1:{target}"]',
            'scrape_interval: 15s': 'scrape_interval: 200ms',
            'evaluation_interval: 15s': 'evaluation_interval: 200ms',
        }.items():
            edit(directory / 'prometheus.yml', theirs, ours)
        self._address = f'127.0.0.1:{free_port()}'
        command = [installed('prometheus', 'prometheus'), '--storage.tsdb.path=data']
        command += ['--config.file=prometheus.yml']
        command += [f'--web.listen-address={self._address}']
        super().__init__(directory, command=command)

    def series(self, query):
        """Return the labels of each series that a query finds, once it finds one."""
        url = f'http://{self._address}/api/v1/query?query={quote(query)}'

        def answer():
            assert self._is_running()
            found = []
            with suppress(URLError), urlopen(url) as response:
                found = json.load(response)['data']['result']
            if not found:
                time.sleep(0.05)  # Prometheus answers at once that there is nothing yet
            return [series['metric'] for series in found]

        return wait_until(answer, query)


def test_service_is_scraped(directory, tmp_path):
    """Prometheus scrapes /metrics, and finds what the rules and the dashboard need."""
    panels = json.loads((RECIPE / 'grafana.json').read_text())['panels']
    assert len({panel['id'] for panel in panels}) == len(panels)
    dashboard = [target['expr'] for panel in panels for target in panel['targets']]
    with (
        Server(tmp_path, PLANTS_METRICS='1', workers=2) as server,
        Prometheus(directory, server.port).started() as prometheus,
    ):
        for text in (f'Bearer {TOKEN}', 'Bearer wrong'):
            server.ask(request(body={'id': 1, 'name': 'Fern'}, authorization=text))
        for query in dashboard:
            if not query.startswith('node_'):
                query = query.replace('$__rate_interval', '1m')
                prometheus.series(query.replace('$instance', '127.0.0.1:.*'))
        for rule in rules():
            for name, matchers in re.findall(
                r'\b(up|plants_\w+|process_\w+)(?:\{(.*?)\})?', rule['expr']
            ):
                labels = {'instance', *re.findall(r'(\w+)=', matchers)}
                assert any(labels <= x.keys() for x in prometheus.series(name)), name
