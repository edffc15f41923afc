"""The manifests in ``deploy/``, checked and run without a cluster."""

import re
import signal

import kubernetes_validate
import pytest
import yaml
from exchange import fern
from server import REPOSITORY, Server, request, wait_until
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


def write_secret(directory, number, tokens):
    """Exchange the files as the kubelet does: rename a link to a new directory."""
    (directory / f'..{number}').mkdir()
    (directory / f'..{number}/tokens').write_text(tokens)
    (directory / '..data_tmp').symlink_to(f'..{number}')
    (directory / '..data_tmp').rename(directory / '..data')


@pytest.mark.parametrize('name', MANIFESTS)
def test_pod_serves_and_stops(name, checkout, url):
    """Probes succeed, a token is exchanged without a restart, SIGTERM ends it."""
    [container] = MANIFESTS[name][0]['spec']['template']['spec']['containers']
    ours = {x['name']: x['value'] for x in container['env'] if 'value' in x}
    for mount in container['volumeMounts']:
        volume = checkout / mount['name']
        volume.mkdir()
        for key, text in ours.items():
            ours[key] = text.replace(mount['mountPath'], str(volume))
    if ours['PLANTS_STORE'].startswith('postgresql:'):
        ours['PLANTS_STORE'] = url
    # What Kubernetes adds for a Service of this name, if nobody forbids that.
    ours['PLANTS_PORT'] = 'tcp://10.0.0.1:80'
    secret = checkout / 'tokens'
    (secret / 'tokens').symlink_to('..data/tokens')
    old, new = 'old-token-of-a-pod', 'new-token-of-a-pod'
    write_secret(secret, 1, f'old {old}\n')
    environment = variables(checkout) | ours | {'PLANTS_TOKENS': None}
    workers = int(ours['WEB_CONCURRENCY'])
    with Server(checkout, command=COMMAND, workers=workers, **environment) as server:
        path = container['readinessProbe']['httpGet']['path']
        assert server.ask(request('GET', path, authorization=None)).status == 200

        def status(token):
            data = request(body=fern(), authorization=f'Bearer {token}')
            return server.ask(data).status

        assert (status(old), status(new)) == (200, 401)
        write_secret(secret, 2, f'new {new}\n')
        wait_until(lambda: status(new) == 200, 'the new token is accepted')
        assert status(old) == 401
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
