"""The image, composition, manifests and alerts in ``deploy/``, without an engine."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from exchange import parse_samples
from machine import client_at
from rawclient import TOKEN, request
from server import REPOSITORY, ROOMS, SCRIPTS, Server, finished, installed
from waiting import wait_until

CONTAINERFILE = (REPOSITORY / 'deploy/Containerfile').read_text().replace('\\\n', '')


def instructions(name):
    """Return the arguments of all instructions of one kind, in order."""
    return re.findall(rf'^{name} +(.*)$', CONTAINERFILE, re.MULTILINE)


[COMMAND] = map(json.loads, instructions('CMD'))
[PORT] = instructions('EXPOSE')
[PROBE] = [json.loads(x.partition('CMD ')[2]) for x in instructions('HEALTHCHECK')]


def variables(directory):
    """Return the environment of a container whose volume is a directory; make that."""
    directory.mkdir(exist_ok=True)
    ours = dict(item.split('=', 1) for item in instructions('ENV'))
    ours['PLANTS_STORE'] = ours['PLANTS_STORE'].replace('/data', str(directory))
    return ours | {'PATH': f'{SCRIPTS}:{os.defpath}'}


def test_composition_needs_its_secrets_and_serves(checkout):
    """No secret, no start; nginx and the health check find what the image copies."""
    copied = {name for item in instructions('COPY') for name in item.split()[:-1]}
    assert copied == {*ROOMS, 'requirements.txt', 'constraints.txt'}
    file = shutil.copy(REPOSITORY / 'deploy/compose.yaml', checkout)
    secrets = re.findall(r'\$\{(\w+):\?', Path(file).read_text())  # needed, not empty
    assert {*secrets} == {'PLANTS_TOKENS', 'DATABASE_PASSWORD'}
    (checkout / '.env').write_text(f'PLANTS_TOKENS={TOKEN}\n')
    command = [installed('docker-compose', 'docker-compose'), '--file', file, 'config']
    how = {'cwd': '/', 'env': {'PATH': os.environ['PATH']}}
    assert finished(command, **how).returncode
    (checkout / '.env').write_text(f'PLANTS_TOKENS={TOKEN}\nDATABASE_PASSWORD=secret\n')
    services = yaml.safe_load(finished(command, **how).stdout)['services']
    ours, nginx = services['plants'], services['nginx']
    service, database = ours['environment'], services['database']['environment']
    assert service['PLANTS_TOKENS'] == TOKEN
    assert not service['PLANTS_METRICS_TOKEN'], 'off'
    assert service['PGPASSWORD'] == database['POSTGRES_PASSWORD'] == 'secret'
    url = 'postgresql://{POSTGRES_USER}@database/{POSTGRES_DB}'
    assert service['PLANTS_STORE'] == url.format(**database)
    assert '/run/plants/plants.sock /run/plants.sock' in nginx['command']
    assert nginx['volumes'][0] in ours['volumes'], 'the directory of the socket'
    path = checkout / 'plants.sock'
    command = ours['command'].replace('/run/plants/plants.sock', str(path))
    command = shlex.split(command.replace(f':{PORT} ', ':0 '))
    environment = variables(checkout / 'data') | {'SCRIPT_NAME': '/\xe4 b'}
    assert environment['PORT'] == PORT
    environment |= {'GUNICORN_CMD_ARGS': None, 'PLANTS_TOKENS': TOKEN, 'PORT': None}
    asking = {'PATH': environment['PATH']}
    asking |= dict.fromkeys(('HTTP_PROXY', 'http_proxy'), 'http://127.0.0.1:9')
    data = request(target='/%c3%a4%20b/plants', body={'id': 1, 'name': 'Fern'})
    for is_tls in (False, True):
        with Server(checkout, command=command, is_tls=is_tls, **environment) as server:
            with client_at(path, server.trust) as client:
                assert client.ask(data).status == 200
            assert path.stat().st_mode & 0o002, 'nginx runs as another user'
            for prefix, port in ('\xe4 b', server.port), ('', server.port), ('', 1):
                asking |= {'PORT': f'{port} ', 'SCRIPT_NAME': prefix}
                assert finished(PROBE, env=asking).returncode == (not prefix)


MANIFESTS = {
    path.stem: list(yaml.safe_load_all(path.read_text()))
    for path in sorted(REPOSITORY.glob('deploy/kubernetes*.yaml'))
}
OLDEST = '1.29'  # ReadWriteOncePod is stable since then


@pytest.mark.parametrize('name', MANIFESTS)
def test_manifest_is_valid_and_its_container_starts(name, checkout):
    """The API accepts each object; they find each other, and a pod its store."""
    for version in (OLDEST, kubernetes_validate.latest_version()):
        for resource in MANIFESTS[name]:
            kubernetes_validate.validate(resource, version, strict=True)
    controller, service, *others = MANIFESTS[name]
    labels = controller['spec']['template']['metadata']['labels']
    assert service['spec']['selector'] == labels
    for item in (controller, *others):
        assert item['spec']['selector'] == {'matchLabels': labels}
    pod = controller['spec']['template']['spec']
    [container], security = pod['containers'], pod['securityContext']
    user = f'{security["runAsUser"]}:{security["runAsGroup"]}'
    assert ['chmod -R a+rX .', user] == instructions('RUN')[2:] + instructions('USER')
    [version] = re.findall(r'image\.version="(.*?)"', ''.join(instructions('LABEL')))
    assert container['image'].endswith(f':{version}')
    ours = {x['name']: x['value'] for x in container['env'] if 'value' in x}
    for mount in container['volumeMounts']:
        volume = checkout / mount['name']
        volume.mkdir()
        for key, text in ours.items():
            ours[key] = text.replace(mount['mountPath'], str(volume))
    # What Kubernetes adds for a Service of this name, if nobody forbids that.
    ours['PLANTS_PORT'] = 'tcp://10.0.0.1:80'
    (checkout / 'tokens/tokens').write_text(TOKEN)
    environment = variables(checkout) | ours | {'PLANTS_TOKENS': None}
    check = Server(checkout, '--check-config', command=COMMAND, **environment)
    assert check.run() == 0, check.log
    # None fails while the store is away: the kubelet would pause for long.
    environment['PLANTS_STORE'] = f'jsonl:{checkout}/away/plants.jsonl'
    for other in pod.get('initContainers', []):
        assert other['image'] == container['image']
        waits = Server(checkout, command=other['command'], **environment)
        with waits.started():
            wait_until(lambda it=waits: 'Error: ' in it.log, 'the store is away')
            (checkout / 'away').mkdir()
            assert waits.wait() == 0


# ---- Prometheus

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
