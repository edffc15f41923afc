"""The page at ``/docs``: its files, and its use in a browser."""

import json
import re
import sys

import pytest
from exchange import assert_error
from server import TOKEN, Server, installed, wait_until
from wsgiclient import Client

from app import create_app
from store.memory import MemoryStore

FILES = {
    '/docs': 'html',
    '/docs/docs.css': 'css',
    '/docs/docs.js': 'javascript',
    '/docs/swagger-ui.css': 'css',
    '/docs/swagger-ui-bundle.js': 'javascript',
}


def test_files_are_public_and_load_only_our_files(anonymous, monkeypatch):
    """Each has its type, and a policy; none is there without Swagger UI's package."""
    for path, kind in FILES.items():
        headers = anonymous.get(path).headers
        assert headers['Content-Type'] == f'text/{kind}; charset=utf-8'
        assert headers['X-Content-Type-Options'] == 'nosniff'
        rules = headers['Content-Security-Policy'].split('; ')
        for forbidden in 'default-src', 'base-uri', 'form-action', 'frame-ancestors':
            assert f"{forbidden} 'none'" in rules
        for rule in rules:
            sources = {'data:'} if rule.startswith('img-src') else {"'self'", "'none'"}
            assert set(rule.split()[1:]) <= sources
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
    assert_error(anonymous.post('/', headers=html), 40100)
    assert_error(anonymous.get('/nowhere', headers=html), 40100)
    assert_error(client.get('/', headers=html), 40400)


@pytest.fixture
def browser():
    """Chromium without a screen."""
    from selenium import webdriver  # the import is slow

    packages = 'chromium chromium-driver'
    options = webdriver.ChromeOptions()
    options.binary_location = installed('chromium', packages)
    # There is no sandbox for root, and CI runs as root.
    for argument in ('--headless', '--no-sandbox', '--disable-gpu'):
        options.add_argument(argument)
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    service = webdriver.ChromeService(installed('chromedriver', packages))
    with webdriver.Chrome(options, service) as browser:
        yield browser


def test_page_adds_a_plant(browser, tmp_path):
    """In dark and in light, behind a prefix: by a link with our token, then a plant."""

    def find(selector):
        def shown():
            found = browser.find_elements('css selector', selector)
            return [element for element in found if element.is_displayed()]

        return wait_until(shown, selector)[0]

    def prefer(scheme):
        media = [{'name': 'prefers-color-scheme', 'value': scheme}]
        browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': media})

    with Server(tmp_path, SCRIPT_NAME='/my/garden') as server:
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
