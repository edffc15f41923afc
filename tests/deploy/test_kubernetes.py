"""The manifests in ``deploy/``, checked and run without a cluster."""

import re
import signal
import subprocess
import time

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


@pytest.mark.parametrize('version', [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize('name', MANIFESTS)
def test_manifest_is_valid(name, version):
    """The schemas of the API accept every object, and know all its members."""
    for resource in MANIFESTS[name]:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize('name', MANIFESTS)
def test_manifest_agrees(name):
    """Objects find each other, and have the values of the image and of gunicorn."""
    controller, service, *others = MANIFESTS[name]
    labels = controller['spec']['template']['metadata']['labels']
    assert service['spec']['selector'] == labels
    for item in (controller, *others):
        assert item['spec']['selector'] == {'matchLabels': labels}
    pod = controller['spec']['template']['spec']
    [container] = pod['containers']
    update = controller['spec'].get('strategy', {}).get('rollingUpdate', {})
    assert update.get('maxUnavailable', 0) == 0, 'a new pod serves first'
    volumes = {volume['name'] for volume in pod['volumes']}
    for claim in controller['spec'].get('volumeClaimTemplates', []):
        volumes.add(claim['metadata']['name'])
    assert {mount['name'] for mount in container['volumeMounts']} == volumes

    security = pod['securityContext']
    user = f'{security["runAsUser"]}:{security["runAsGroup"]}'
    assert [user] == instructions('USER')
    assert [str(port['containerPort']) for port in container['ports']] == [PORT]
    [version] = re.findall(r'image\.version="(.*?)"', ''.join(instructions('LABEL')))
    assert container['image'].endswith(f':{version}')
    code = (REPOSITORY / 'gunicorn.conf.py').read_text()
    [seconds] = re.findall(r'^graceful_timeout = (\d+)$', code, re.MULTILINE)
    [_, pause] = container['lifecycle']['preStop']['exec']['command']
    assert int(pause) + int(seconds) < pod['terminationGracePeriodSeconds']


VOLUMES = {
    *('configMap', 'csi', 'downwardAPI', 'emptyDir', 'ephemeral'),
    *('persistentVolumeClaim', 'projected', 'secret'),
}


# What the profile permits of a pod, and what each container must have.
PERMITTED = {'fsGroup', 'fsGroupChangePolicy', 'runAsGroup', 'runAsUser'}
CONFINED = {
    'allowPrivilegeEscalation': False,
    'capabilities': {'drop': ['ALL']},
    'readOnlyRootFilesystem': True,
}


@pytest.mark.parametrize('name', MANIFESTS)
def test_pod_keeps_the_restricted_pod_security_standard(name):
    """A namespace that enforces the restricted profile admits the pods."""
    pod = MANIFESTS[name][0]['spec']['template']['spec']
    assert not pod.keys() & {'hostNetwork', 'hostPID', 'hostIPC', 'initContainers'}
    assert {kind for each in pod['volumes'] for kind in each} - {'name'} <= VOLUMES
    security = pod['securityContext']
    assert security['runAsUser'] != 0
    assert {name: security[name] for name in security.keys() - PERMITTED} == {
        'runAsNonRoot': True,
        'seccompProfile': {'type': 'RuntimeDefault'},
    }
    for container in pod['containers']:
        assert container['securityContext'] == CONFINED
        assert not any('hostPort' in port for port in container['ports'])


def write_secret(directory, number, tokens):
    """Exchange the files as the kubelet does: rename a link to a new directory."""
    (directory / f'..{number}').mkdir()
    (directory / f'..{number}/tokens').write_text(tokens)
    (directory / '..data_tmp').symlink_to(f'..{number}')
    (directory / '..data_tmp').rename(directory / '..data')


@pytest.mark.parametrize('name', MANIFESTS)
def test_pod_serves_and_stops(name, checkout, url):
    """Probes succeed, a token is exchanged without a restart, SIGTERM ends it."""
    pod = MANIFESTS[name][0]['spec']['template']['spec']
    [container] = pod['containers']
    assert pod['enableServiceLinks'] is False, 'PLANTS_PORT would stop the start'
    ours = {item['name']: item.get('value') for item in container['env']}
    for mount in container['volumeMounts']:
        volume = checkout / mount['name']
        volume.mkdir()
        for key, text in ours.items():
            ours[key] = text and text.replace(mount['mountPath'], str(volume))
    if ours['PLANTS_STORE'].startswith('postgresql:'):
        ours['PLANTS_STORE'] = url
    secret = checkout / 'tokens'
    (secret / 'tokens').symlink_to('..data/tokens')
    write_secret(secret, 1, 'old old-token\n')
    environment = variables(checkout) | ours | {'PLANTS_TOKENS': None}
    workers = int(ours['WEB_CONCURRENCY'])
    with Server(checkout, command=COMMAND, workers=workers, **environment) as server:
        for probe in ('startupProbe', 'livenessProbe', 'readinessProbe'):
            path = container[probe]['httpGet']['path']
            assert server.ask(request('GET', path, authorization=None)).status == 200

        def status(token):
            time.sleep(0.02)  # it is asked again and again
            data = request(body=fern(), authorization=f'Bearer {token}')
            return server.ask(data).status

        assert (status('old-token'), status('new-token')) == (200, 401)
        write_secret(secret, 2, 'old old-token\nnew new-token\n')
        wait_until(lambda: status('new-token') == 200, 'the new token is accepted')
        write_secret(secret, 3, 'new new-token\n')
        wait_until(lambda: status('old-token') == 401, 'the old token is refused')

        # During the pause new connections arrive; of the 5 s the test takes half a one.
        program, _ = container['lifecycle']['preStop']['exec']['command']
        with subprocess.Popen([program, '0.5']) as pause:
            while pause.poll() is None:
                assert status('new-token') == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
