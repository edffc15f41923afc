"""The clients that ``docs/api.md`` shows: a lost answer, and a refusal."""

import json
import re
import sys

import pytest
from exchange import fern
from proxy import Proxy
from server import REPOSITORY, TOKEN, finished, installed

PAGE = (REPOSITORY / 'docs/api.md').read_text()
# By the language of its block: what runs it, and what calls it.
CLIENTS = {
    'py': (sys.executable, '-c', 'print(json.dumps(add_plant(*{})))'),
    'js': ('node', '-e', 'addPlant(...{}).then(JSON.stringify).then(console.log)'),
}


@pytest.mark.parametrize('language', CLIENTS)
def test_client_repeats_what_was_lost_and_no_refusal(language, service):
    """The plant is stored once, and the answer to the repeat is the first one's."""
    program, option, call = CLIENTS[language]
    [code] = re.findall(rf'^```{language}\n(.*?)^```$', PAGE, re.M | re.S)
    plant = fern(tag=language)
    with Proxy(service.port) as proxy:
        proxy.cut(after=0)
        for body, said in (plant, '"name": *"Fern"'), (plant | {'name': 'Moss'}, '400'):
            url = f'http://127.0.0.1:{proxy.port}/plants'
            called = code + call.format(json.dumps([body, url, TOKEN]))
            done = finished([installed(program, 'nodejs'), option, called])
            assert re.search(said, done.stdout + done.stderr)
    assert service.plants().count(plant) == 1
