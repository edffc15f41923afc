"""The scrape configuration and the alerts in ``deploy/prometheus/``, run for real."""

import json
import re
import shutil

import yaml
from exchange import parse_samples
from server import REPOSITORY, TOKEN, finished, installed

RECIPE = REPOSITORY / 'deploy/prometheus'
RULES = yaml.safe_load((RECIPE / 'plants.rules.yml').read_text())['groups'][0]['rules']


def test_configuration_is_sound_and_alerts_when_it_should(tmp_path):
    """Promtool finds no fault, and the tests of the rules pass."""
    promtool = installed('promtool', 'prometheus')
    shutil.copytree(RECIPE, tmp_path / 'prometheus')
    (tmp_path / 'prometheus/plants-token').write_text(TOKEN)
    files = list((tmp_path / 'prometheus').glob('*.test.yml'))
    check = 'check', 'config', '--lint-fatal', tmp_path / 'prometheus/prometheus.yml'
    for arguments in (check, ('test', 'rules', *files)):
        done = finished([promtool, *arguments])
        assert done.returncode == 0, done.stdout + done.stderr


def test_service_has_the_metrics_of_alerts_and_dashboard(serve, store):
    """Each metric that a rule or a panel reads is there, with the labels it reads."""
    panels = json.loads((RECIPE / 'grafana.json').read_text())['panels']
    queries = [target['expr'] for panel in panels for target in panel['targets']]
    queries += [rule['expr'] for rule in RULES]
    client = serve(store, metrics_token='for-metrics')
    client.add({'id': 1, 'name': 'Fern'})
    answer = client.get('/metrics', headers={'Authorization': 'Bearer for-metrics'})
    samples = [(each.name, each.labels.keys()) for each in parse_samples(answer.text)]
    found = re.findall(r'\b(plants?_\w+)(?:\{(.*?)\})?', ' '.join(queries))
    assert len(found) > 10
    for name, matchers in found:
        wanted = {*re.findall(r'(\w+)=', matchers)} - {'instance', 'job'}
        assert [labels for own, labels in samples if own == name and wanted <= labels]
