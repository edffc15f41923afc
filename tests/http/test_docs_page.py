"""The page at ``/docs``: its files, and its use in a browser."""

import json
import sys

import pytest
from exchange import assert_error
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions as expected
from selenium.webdriver.support.ui import WebDriverWait
from server import PATIENCE, TOKEN, installed
from test_embedding import served_by_waitress

from store import Plant

CHROMIUM = 'chromium chromium-driver'  # packages
FILES = {
    '/docs': 'text/html',
    '/docs/docs.css': 'text/css',
    '/docs/docs.js': 'text/javascript',
    '/docs/swagger-ui.css': 'text/css',
    '/docs/swagger-ui-bundle.js': 'text/javascript',
}


@pytest.mark.parametrize('path', FILES)
def test_file_is_public_and_loads_only_our_files(path, anonymous):
    """Each file is public, has its type, and a policy against foreign content."""
    response = anonymous.get(path)
    assert response.status_int == 200
    assert response.headers['Content-Type'] == f'{FILES[path]}; charset=utf-8'
    assert response.headers['X-Content-Type-Options'] == 'nosniff'
    seconds = 86_400 if 'swagger' in path else 0  # the large files change rarely
    assert response.headers['Cache-Control'] == f'max-age={seconds}'
    rules = response.headers['Content-Security-Policy'].split('; ')
    for forbidden in 'default-src', 'base-uri', 'form-action', 'frame-ancestors':
        assert f"{forbidden} 'none'" in rules
    for rule in rules:
        assert set(rule.split()[1:]) <= {"'self'", "'none'", 'data:'}
        assert 'data:' not in rule or rule.startswith('img-src')
    head = anonymous.head(path)
    assert head.headers['Content-Length'] == str(len(response.body))
    assert head.body == b''


@pytest.mark.parametrize('path', FILES)
def test_page_without_swagger_ui_is_40400(path, anonymous, monkeypatch):
    """Without Swagger UI's package there is no page, and the message says so."""
    monkeypatch.setitem(sys.modules, 'swagger_ui_bundle', None)
    assert 'swagger-ui-bundle-v2' in assert_error(anonymous.get(path), 40400)
    assert anonymous.head(path).status_int == 404
    assert anonymous.get('/openapi.json').status_int == 200


def test_only_browsers_are_led_to_the_page(client, anonymous):
    """Without a token / is a redirect for a browser, and 401 for others."""
    html = {'Accept': 'text/html,application/xhtml+xml;q=0.9,*/*;q=0.8'}
    for method in ('GET', 'HEAD'):
        response = anonymous.request('/', method=method, headers=html)
        assert (response.status_int, response.headers['Location']) == (303, './docs')
    mount = {'SCRIPT_NAME': '/my/garden', 'PATH_INFO': ''}
    response = anonymous.get('/', headers=html, extra_environ=mount)
    assert response.headers['Location'] == 'garden/docs'
    assert_error(anonymous.get('/', headers={'Accept': '*/*'}), 40100)
    assert_error(anonymous.post('/', headers=html), 40100)
    assert_error(anonymous.get('/nowhere', headers=html), 40100)
    assert_error(client.get('/', headers=html), 40400)


ARGUMENTS = [
    # There is no sandbox for root, and CI runs as root.
    *('--headless', '--no-sandbox', '--window-size=800,600'),
    # What costs as much CPU as the page: pixels that nobody sees, and a second page,
    # for what one types into the bar.
    *('--disable-gpu', '--disable-software-rasterizer'),
    '--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup',
]


@pytest.fixture(scope='module')
def browser():
    """Chromium without a screen."""
    options = webdriver.ChromeOptions()
    options.binary_location = installed('chromium', CHROMIUM)
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    service = webdriver.ChromeService(installed('chromedriver', CHROMIUM))
    browser = webdriver.Chrome(options, service)
    yield browser
    browser.quit()


class Page:
    """The page at a URL in a browser, with the actions of its user."""

    def __init__(self, browser, url):
        self._browser = browser
        self.console_messages()  # drop those of the page before
        self.prefer('dark')
        browser.get(url)

    def prefer(self, scheme):
        """Have the user prefer dark or light colours."""
        media = [{'name': 'prefers-color-scheme', 'value': scheme}]
        self._browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': media})

    def find(self, selector):
        """Wait until a CSS selector finds a visible element, and return it."""
        shown = expected.visibility_of_any_elements_located((By.CSS_SELECTOR, selector))
        return WebDriverWait(self._browser, PATIENCE, 0.1).until(shown, selector)[0]

    def authorize(self, token):
        self.find('.auth-wrapper .authorize').click()
        self.find('.auth-container input').send_keys(token)
        self.find('.auth-container .authorize').click()
        self.find('.auth-container .btn-done').click()

    def log_out(self):
        """Forget the token, and the answer to it."""
        self.find('.auth-wrapper .authorize').click()
        self.find('.auth-container .auth:not(.btn-done)').click()
        self.find('.auth-container .btn-done').click()
        self.find('.btn-clear').click()

    def fill_in(self, plant):
        self.find('#operations-Plants-addPlant .opblock-control-arrow').click()
        field = self.find('.body-param__text')
        offered = json.loads(field.get_attribute('value'))
        field.clear()
        field.click()
        # Pasted, not typed: the page is drawn again at every key.
        self._browser.execute_cdp_cmd('Input.insertText', {'text': json.dumps(plant)})
        return offered

    def send(self):
        """Send what is filled in; return the status and the body of the answer."""
        self.find('.execute').click()
        status = self.find('.live-responses-table tbody .response-col_status').text
        body = self.find('.live-responses-table tbody .highlight-code code').text
        return int(status.split()[0]), json.loads(body)

    def console_messages(self):
        """Return the messages in the browser's console since the last call."""
        return [line['message'] for line in self._browser.get_log('browser')]


@pytest.fixture
def base(request, app):
    """The base URL of the application, which may be behind a proxy."""
    prefix = getattr(request, 'param', '')

    def site(environ, start_response):
        # Such a proxy removes the prefix, without a header that says so.
        path = environ['PATH_INFO']
        assert path.startswith(prefix)
        return app(environ | {'PATH_INFO': path.removeprefix(prefix)}, start_response)

    with served_by_waitress(site) as port:
        yield f'http://127.0.0.1:{port}{prefix}'


@pytest.fixture
def page(browser, base):
    """The page, to which a browser at the base URL is led."""
    page = Page(browser, f'{base}/')
    page.find('html.dark-mode .opblock')
    assert browser.current_url == f'{base}/docs'
    assert page.console_messages() == []
    return page


# How far the buttons of an answer reach into its text, in pixels.
COVERED = """
const answer = document.querySelector('.live-responses-table .highlight-code');
const ends = [...answer.querySelectorAll('span')].map(
    span => span.getBoundingClientRect().bottom);
const button = answer.querySelector('.download-contents').getBoundingClientRect();
return Math.max(...ends) - button.top;
"""
# Find the elements beyond the edges of the window, unless a parent clips or scrolls.
FIND_OUTSIDE = """
function frame(element) {
    const parent = element.parentElement;
    if (!parent) return {left: 0, right: innerWidth};
    const style = getComputedStyle(parent);
    return style.overflowX === 'visible' ? frame(parent) : null;
}
return [...document.querySelectorAll('body, body *')].filter(element => {
    const box = element.getBoundingClientRect();
    const within = frame(element);
    return box.width && within && (box.left < within.left || box.right > within.right);
}).map(element => element.outerHTML.slice(0, 80));
"""
# The contrasts of texts (WCAG 2): the backgrounds are laid over each other.
CONTRASTS = """
const parse = text => { const [r, g, b, a = 1] = text.match(/[0-9.]+/g).map(Number);
    return [r, g, b, a]; };
const over = (top, below) => [0, 1, 2].map(
    i => top[i] * top[3] + below[i] * (1 - top[3]));
const background = element => !element ? [255, 255, 255] : over(
    parse(getComputedStyle(element).backgroundColor),
    background(element.parentElement));
const light = colour => colour.map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, i) => sum + [0.2126, 0.7152, 0.0722][i] * each, 0.05);
document.getAnimations().forEach(change => change.finish());
return [...document.querySelectorAll(arguments[0])].map(element => {
    const below = background(element);
    const text = over(parse(getComputedStyle(element).color), below);
    const [dark, bright] = [light(text), light(below)].sort((a, b) => a - b);
    return bright / dark;
});
"""
COLOUR_SCHEME = 'return getComputedStyle(document.body).colorScheme'
# By how many pixels inline code reaches beyond its line.
BEYOND = """
return [...document.querySelectorAll('.renderedMarkdown code')].map(code => {
    const text = document.createRange();
    text.selectNodeContents(code);
    return code.getClientRects()[0].height - text.getClientRects()[0].height;
});
"""


def assert_readable(browser, page):
    """Check that texts have contrast in the colours of the user, and code room."""
    for scheme in 'dark', 'light', 'dark':
        page.prefer(scheme)
        page.find({'dark': 'html.dark-mode', 'light': 'html:not(.dark-mode)'}[scheme])
        for selector in ('.btn.cancel', '.highlight-code span'):
            found = browser.execute_script(CONTRASTS, selector)
            assert found
            assert min(found) >= 4.5, f'{selector}, {scheme}'
        shown = browser.execute_script(COLOUR_SCHEME)
        assert shown == {'dark': 'dark', 'light': 'normal'}[scheme]
    assert set(browser.execute_script(BEYOND)) == {0}
    types = browser.find_elements(By.CSS_SELECTOR, '.models strong[class*=primary]')
    assert [element.text for element in types] == 3 * ['object']


@pytest.mark.parametrize('base', ['/home/garden'], indirect=True)
def test_page_adds_a_plant_in_a_narrow_window(browser, page, store):
    """The page shows a wrong token, adds with ours, and is readable at 400 pixels."""
    screen = {'width': 400, 'height': 900, 'deviceScaleFactor': 1, 'mobile': False}
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', screen)
    plant = {'id': 7, 'name': 'A name without a space' * 20, 'tag': 'shade'}
    page.authorize('guessed')
    assert page.fill_in(plant) == {'id': 1, 'name': 'Fern', 'tag': 'shade'}
    status, error = page.send()
    assert (status, error['error']) == (401, 40101)
    # The browser reports only the refused request in its console.
    (message,) = page.console_messages()
    assert '401' in message
    page.log_out()
    page.authorize(TOKEN)
    assert page.send() == (200, {'name': plant['name'], 'tag': 'shade'})
    assert list(store) == [Plant(**plant)]
    assert browser.execute_script(COVERED) <= 0
    assert_readable(browser, page)
    browser.execute_script(
        "document.querySelectorAll('.json-schema-2020-12-expand-deep-button')"
        '.forEach(button => button.click())'
    )
    assert browser.execute_script(FIND_OUTSIDE) == []
    margin = browser.execute_script('return document.body.getBoundingClientRect().x')
    assert margin == 0
    assert page.console_messages() == []
    browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})


def test_dialog_is_used_with_the_keyboard_alone(browser, page, store):
    """Tab stays in the dialog, Escape closes it, and its button has the focus again."""

    def press(*keys):
        ActionChains(browser).send_keys(*keys).perform()

    def focused():
        return browser.switch_to.active_element

    opener = page.find('.auth-wrapper .authorize')
    opener.send_keys(Keys.ENTER)
    assert focused() == page.find('.dialog-ux input')
    reached = [press(Keys.TAB) or focused().get_attribute('class') for _ in range(4)]
    assert reached[1:] == ['btn modal-btn auth btn-done button', 'close-modal', '']
    press(Keys.ESCAPE)
    assert not browser.find_elements(By.CSS_SELECTOR, '.dialog-ux')
    assert focused() == opener
    press(Keys.ENTER)
    press(TOKEN, Keys.ENTER)
    assert 'btn-done' in focused().get_attribute('class')
    press(Keys.TAB, Keys.TAB, Keys.TAB)
    assert 'btn-done' in focused().get_attribute('class')
    press(Keys.ENTER)
    assert focused() == page.find('.auth-wrapper .authorize')
    page.fill_in({'id': 1, 'name': 'Fern'})
    assert page.send()[0] == 200
