"""The clients that ``docs/api.md`` shows, each with a lost answer and a refusal."""

import json
import re
from urllib.error import HTTPError

import pytest
from exchange import fern
from proxy import Proxy
from server import REPOSITORY, TOKEN, finished, installed

PAGE = (REPOSITORY / 'docs/api.md').read_text()


def in_python(code, *arguments):
    """Call the client in Python; return the answer."""
    names = {}
    exec(code, names)
    try:
        return names['add_plant'](*arguments)
    except HTTPError as ex:
        with ex:
            return json.load(ex)


def in_javascript(code, *arguments):
    """Call the client in JavaScript; return the answer."""
    call = f'addPlant(...{json.dumps(arguments)}).then(JSON.stringify)'
    node = installed('node', 'nodejs')
    done = finished([node, '-e', f'{code};{call}.then(console.log)'], check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ('language', 'add'), [('py', in_python), ('js', in_javascript)]
)
def test_client_repeats_what_was_lost_and_no_refusal(language, add, service):
    """The plant is stored once, and the answer to the repeat is the first one's."""
    [code] = re.findall(rf'^```{language}\n(.*?)^```$', PAGE, re.M | re.S)
    plant = fern(tag=language)
    with Proxy(service.port) as proxy:
        proxy.cut(after=0)
        url = f'http://127.0.0.1:{proxy.port}/plants'
        answer = {'name': 'Fern', 'tag': language}
        assert add(code, plant, url, TOKEN) == answer
        assert add(code, plant | {'name': 'Moss'}, url, TOKEN)['error'] == 40006
    assert service.plants().count(plant) == 1
