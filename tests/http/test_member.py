"""A new member of a plant: written in two places, and known everywhere."""

import json
import sys

from machine import edit
from server import finished

PROGRAM = """
import json
from falcon.testing import TestClient
from app import create_app
from store import open_store
from store.__main__ import main

new = {'id': 1, 'name': 'Fern', 'origin': 'Peru'}
plants = [new, new, {**new, 'origin': 'Chile'}, {'id': 1, 'name': 'Fern'}]
plants += [{'id': 2, 'name': 'Moss', 'tag': 'sun'}, {**new, 'id': 3, 'origin': 4}]
with open_store('jsonl:plants.jsonl') as store:
    client = TestClient(create_app(store, tokens='token'))
    for plant in plants:
        headers = {'Authorization': 'Bearer token'}
        print(client.simulate_post('/plants', json=plant, headers=headers).text)
    description = client.simulate_get('/openapi.json').json
    print(json.dumps(list(description['components']['schemas']['NewPlant']['properties'])))
assert main(['list', 'jsonl:plants.jsonl']) == 0
"""


def test_member_is_added_in_two_places(checkout):
    """``schemas/Plant.json`` and ``Plant``: it is checked, answered, stored, listed."""
    path = checkout / 'schemas/Plant.json'
    schema = json.loads(path.read_text())
    schema['properties']['origin'] = {'type': 'string', 'pattern': '^[^\\u0000]*$'}
    path.write_text(json.dumps(schema))
    tag = '    tag: str | None = None'
    edit(checkout / 'store/base.py', tag, f'    origin: str | None = None\n{tag}')

    done = finished([sys.executable, '-c', PROGRAM], cwd=checkout)
    assert done.returncode == 0, done.stderr
    *answers, members, first, second = map(json.loads, done.stdout.splitlines())
    fern, repeated, taken, without, moss, wrong = answers
    assert fern == repeated == {'name': 'Fern', 'origin': 'Peru'}
    assert moss == {'name': 'Moss', 'tag': 'sun'}
    assert [each['error'] for each in (taken, without, wrong)] == [40006, 40006, 40005]
    assert {*members} == {'id', 'name', 'origin', 'tag'}
    assert [first, second] == [{'id': 1, **fern}, {'id': 2, **moss}]
