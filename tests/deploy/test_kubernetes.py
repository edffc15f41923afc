"""The manifests in ``deploy/``, checked and run without a cluster."""

import re
import signal

import kubernetes_validate
import pytest
import yaml
from exchange import fern
from server import REPOSITORY, TOKEN, Server, request
from test_containers import COMMAND, PORT, instructions, variables

MANIFESTS = {
    path.stem: list(yaml.safe_load_all(path.read_text()))
    for path in sorted(REPOSITORY.glob('deploy/kubernetes*.yaml'))
}
OLDEST = '1.29'  # ReadWriteOncePod is stable since then


@pytest.mark.parametrize('name', MANIFESTS)
def test_manifest_is_valid(name):
    """The API accepts every object; objects find each other and the image."""
    for version in (OLDEST, kubernetes_validate.latest_version()):
        for resource in MANIFESTS[name]:
            kubernetes_validate.validate(resource, version, strict=True)
    controller, service, *others = MANIFESTS[name]
    labels = controller['spec']['template']['metadata']['labels']
    assert service['spec']['selector'] == labels
    for item in (controller, *others):
        assert item['spec']['selector'] == {'matchLabels': labels}
    pod = controller['spec']['template']['spec']
    [container] = pod['containers']
    security = pod['securityContext']
    user = f'{security["runAsUser"]}:{security["runAsGroup"]}'
    assert [user] == instructions('USER')
    assert [str(port['containerPort']) for port in container['ports']] == [PORT]
    [version] = re.findall(r'image\.version="(.*?)"', ''.join(instructions('LABEL')))
    assert container['image'].endswith(f':{version}')


@pytest.mark.parametrize('name', MANIFESTS)
def test_container_starts_with_its_settings(name, checkout):
    """A check of the settings of the container succeeds; a pod with a file serves."""
    [container] = MANIFESTS[name][0]['spec']['template']['spec']['containers']
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
    if ours['PLANTS_STORE'].startswith('postgresql:'):
        check = Server(checkout, '--check-config', command=COMMAND, **environment)
        assert check.run() == 0, check.log
        return
    workers = int(ours['WEB_CONCURRENCY'])
    with Server(checkout, command=COMMAND, workers=workers, **environment) as server:
        path = container['readinessProbe']['httpGet']['path']
        assert server.ask(request('GET', path, authorization=None)).status == 200
        assert server.ask(request(body=fern())).status == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
