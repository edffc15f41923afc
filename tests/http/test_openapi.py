"""The OpenAPI description, and whether the service does what it says."""

import os
import re
import sys

import pytest
from exchange import ERROR
from jsonschema import Draft202012Validator
from server import REPOSITORY, TOKEN, Server, finished

from store import __version__
from web.errors import ErrorValue


def test_description_is_valid_with_metrics_and_without(store, serve, anonymous):
    """It is OpenAPI 3.1, with /metrics and its token if and only if that is served.

    Each error value is an example, a valid ``Error``, under its status.
    """
    from openapi_spec_validator import validate  # the import is slow

    client = serve(store, metrics_token='m', max_body_bytes=1234)
    described = [each.get('/openapi.json').json for each in (anonymous, client)]
    for each in described:
        assert each['info']['version'] == __version__
        validate(each)
    assert '/metrics' not in described[0]['paths']
    operation = described[1]['paths']['/metrics']['get']
    assert 'security' not in operation
    assert set(operation['responses']) == {'200', '401', 'default'}
    body = described[1]['paths']['/plants']['post']['requestBody']
    assert '1234' in body['description']
    assert body['content']['application/json']['example'], 'Postman sends it'
    found = set()
    for status, answer in described[0]['components']['responses'].items():
        content = answer['content']['application/json']
        assert content['schema'] == {'$ref': '#/components/schemas/Error'}
        for name, example in content['examples'].items():
            ERROR.validate(example['value'])
            assert int(name) == example['value']['error']
            assert status in {name[:3], 'default'}
            found.add(int(name))
    assert found == {*ErrorValue}


SOIL = {'properties': {'soil': {'type': 'string'}}, 'required': ['soil']}
# What an operator may change: a file, and its new keywords.
EDITS = [
    ('Plant', {'properties': {'name': {'type': 'string', 'maxLength': 3}}}),
    ('Plant', {'required': ['name', 'tag']}),
    ('NewPlant', {'required': ['id', 'soil']}),
    ('NewPlant', {'allOf': [{'$ref': 'Plant.json'}, SOIL, True]}),
]
WHOLE = {'id': 1, 'name': 'Ivy', 'tag': 'sun', 'soil': 'wet'}
BODIES = [WHOLE, WHOLE | {'name': 'Fern'}, WHOLE | {'soil': 1}]
BODIES += [{k: WHOLE[k] for k in WHOLE.keys() - {name}} for name in WHOLE]


@pytest.mark.parametrize(('file', 'keywords'), EDITS)
def test_description_has_the_rules_in_use(edit_schema, serve, store, file, keywords):
    """An edit is described: a body fits the description if it is accepted."""
    edit_schema(file, lambda schema: schema.update(keywords))
    client = serve(store)
    description = client.get('/openapi.json').json
    assert 'allOf' not in description['components']['schemas']['NewPlant']
    schema = {'$ref': '#/components/schemas/NewPlant', **description}
    for body in BODIES:
        fits = Draft202012Validator(schema).is_valid(body)
        # The id may be taken.
        assert fits == (client.add(body).json.get('error') != 40005), body


def test_service_answers_as_described(tmp_path):
    """Valid and invalid requests of all kinds are answered as described."""
    with Server(tmp_path) as server:
        command = [
            *(sys.executable, '-m', 'schemathesis.cli', 'run', '--no-color'),
            *('--header', f'Authorization: Bearer {TOKEN}'),
            *('--phases', 'examples,coverage', '--seed', '1'),
            *('--generation-database', 'none'),
            # To JSON Schema 1.0 is an integer, and it does not know which id is taken.
            *('--exclude-checks', 'positive_data_acceptance'),
            f'http://127.0.0.1:{server.port}/openapi.json',
        ]
        # That of pytest: a new one costs 3 s, for a table of all characters.
        storage = {'HYPOTHESIS_STORAGE_DIRECTORY': str(REPOSITORY / '.hypothesis')}
        result = finished(command, cwd=tmp_path, env=os.environ | storage)
        answered = set(re.findall(r' (\w+ /[a-z.]+ \d{3}) ', server.log))
    assert result.returncode == 0, result.stdout + result.stderr
    # The response "default" would describe any status.
    assert {line[-3:] for line in answered} == {'200', '400', '401', '405'}
    assert {f'POST /plants {status}' for status in (200, 400, 401)} <= answered
