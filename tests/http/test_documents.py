"""Public documents: the OpenAPI description, and the page at ``/docs``."""

import json
import os
import re
import sys

import pytest
from exchange import ERROR, Client, assert_error
from jsonschema import Draft202012Validator
from server import REPOSITORY, TOKEN, Server, finished, installed, wait_until

from app import create_app
from store import __version__
from store.memory import MemoryStore
from web.errors import ErrorValue


def test_description_is_valid_with_metrics_and_without(store, serve, anonymous):
    """OpenAPI 3.1, /metrics if it is served; each error value is a valid example."""
    from openapi_spec_validator import validate  # the import is slow

    client = serve(store, metrics_token='m')
    described = [each.get('/openapi.json').json for each in (anonymous, client)]
    for each in described:
        assert each['info']['version'] == __version__
        validate(each)
    assert '/metrics' not in described[0]['paths']
    assert 'security' not in described[1]['paths']['/metrics']['get']
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
    merged = description['components']['schemas']['NewPlant']
    assert not {'allOf', '$schema'} & merged.keys()
    schema = {'$ref': '#/components/schemas/NewPlant', **description}
    for body in BODIES:
        fits = Draft202012Validator(schema).is_valid(body)
        # The id may be taken.
        assert fits == (client.add(body).json.get('error') != 40005), body


def test_service_answers_as_described(tmp_path):
    """Valid and invalid requests of all kinds are answered as described."""
    with Server(tmp_path) as server:
        command = [sys.executable, '-m', 'schemathesis.cli', 'run', '--no-color']
        command += ['--phases', 'examples,coverage', '--seed', '1']
        command += ['--generation-database', 'none']
        # To JSON Schema 1.0 is an integer, and it does not know which id is taken.
        command += ['--exclude-checks', 'positive_data_acceptance']
        command += ['--header', f'Authorization: Bearer {TOKEN}']
        command += [f'http://127.0.0.1:{server.port}/openapi.json']
        # That of pytest: a new one costs 3 s, for a table of all characters.
        storage = {'HYPOTHESIS_STORAGE_DIRECTORY': str(REPOSITORY / '.hypothesis')}
        result = finished(command, cwd=tmp_path, env=os.environ | storage)
        answered = set(re.findall(r' (\w+ /[a-z.]+ \d{3}) ', server.log))
    assert result.returncode == 0, result.stdout + result.stderr
    # The response "default" would describe any status.
    assert {line[-3:] for line in answered} == {'200', '400', '401', '405'}
    assert {f'POST /plants {status}' for status in (200, 400, 401)} <= answered


# ---- the page

FILES = {'/docs': 'html', '/docs/docs.css': 'css', '/docs/docs.js': 'javascript'}
FILES |= {'/docs/swagger-ui.css': 'css', '/docs/swagger-ui-bundle.js': 'javascript'}


def test_files_are_public_and_load_only_our_files(anonymous, monkeypatch):
    """Each has its type, and a policy; none is there without Swagger UI's package."""
    none = [f"{each} 'none'" for each in ('base-uri', 'form-action', 'frame-ancestors')]
    for path, kind in FILES.items():
        headers = anonymous.get(path).headers
        assert headers['Content-Type'] == f'text/{kind}; charset=utf-8'
        assert headers['X-Content-Type-Options'] == 'nosniff'
        rules = headers['Content-Security-Policy'].split('; ')
        assert sorted(rules) == sorted(["default-src 'self'", 'img-src data:', *none])
    monkeypatch.setitem(sys.modules, 'swagger_ui_bundle', None)
    without = Client(create_app(MemoryStore(), tokens='token'))
    for path in FILES:
        assert 'swagger-ui-bundle-v2' in assert_error(without.get(path), 40400)
    assert without.get('/openapi.json').status_int == 200


def test_only_browsers_are_led_to_the_page(client, anonymous):
    """Without a token / is a redirect for a browser, and 401 for others."""
    html = {'Accept': 'text/html,application/xhtml+xml;q=0.9,*/*;q=0.8'}
    for method in ('GET', 'HEAD'):
        response = anonymous.request('/', method=method, headers=html)
        assert (response.status_int, response.headers['Location']) == (303, './docs')
    # As a path of UTF-8 is in a WSGI environment; a colon would end a scheme.
    for mount, shown in ('garden', 'garden'), ('\xe8\x8a\xb1:\n', '%E8%8A%B1%3A%0A'):
        environ = {'SCRIPT_NAME': f'/my/{mount}', 'PATH_INFO': ''}
        response = anonymous.get('/', headers=html, extra_environ=environ)
        assert response.headers['Location'] == f'{shown}/docs'
    assert_error(anonymous.get('/', headers={'Accept': '*/*'}), 40100)
    assert_error(anonymous.post('/', headers=html), 40100)  # as some clients accept
    assert_error(anonymous.get('/nowhere', headers=html), 40100)
    assert_error(client.get('/', headers=html), 40400)


def test_page_adds_a_plant(tmp_path):
    """In dark and in light, behind a prefix: by a link with our token, then a plant."""
    from selenium import webdriver  # the import is slow

    packages = 'chromium chromium-driver'
    options = webdriver.ChromeOptions()
    options.binary_location = installed('chromium', packages)
    options.add_argument('--headless')
    options.add_argument('--no-sandbox')  # there is none for root, as whom CI runs
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    driver = webdriver.ChromeService(installed('chromedriver', packages))

    def find(selector):
        def shown():
            found = browser.find_elements('css selector', selector)
            return [element for element in found if element.is_displayed()]

        return wait_until(shown, selector)[0]

    def prefer(scheme):
        media = [{'name': 'prefers-color-scheme', 'value': scheme}]
        browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': media})

    server = Server(tmp_path, SCRIPT_NAME='/my/garden')
    with server, webdriver.Chrome(options, driver) as browser:
        prefer('dark')
        base = f'http://127.0.0.1:{server.port}/my/garden'
        browser.get(f'{base}/#token={TOKEN}')
        find('html.dark-mode .opblock')
        prefer('light')
        find('html:not(.dark-mode) .opblock')
        for _ in range(2):
            assert find('.authorize.locked')
            assert browser.current_url == f'{base}/docs'
            assert browser.get_log('browser') == []
            browser.refresh()  # it keeps the token
        find('#operations-Plants-addPlant .opblock-control-arrow').click()
        phone = {'width': 390, 'height': 800, 'deviceScaleFactor': 1, 'mobile': True}
        browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', phone)
        prefer('dark')
        colour = find('.headers td').value_of_css_property('color')
        assert min(map(int, re.findall(r'\d+', colour)[:3])) > 128
        assert browser.execute_script('return document.body.scrollWidth') <= 390
        plant = json.loads(find('.body-param__text').get_attribute('value'))
        find('.execute').click()
        status = find('.live-responses-table tbody .response-col_status').text
        body = find('.live-responses-table tbody .highlight-code code').text
        assert status.startswith('200')
        assert json.loads(body) == {name: plant[name] for name in ('name', 'tag')}
        assert server.plants() == [plant]
        assert browser.get_log('browser') == []
