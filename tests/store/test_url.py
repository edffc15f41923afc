"""Store URLs: errors say what is wrong, and never show a secret."""

import traceback
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from store import Plant, masked, open_store
from store.masking import clean

FERN, MOSS = Plant(1, 'Fern'), Plant(2, 'Moss')

SHOWN = {
    'memory:': 'memory:',
    'jsonl:/a:b@c': 'jsonl:/a:b@c',
    'postgresql://me:SECRET@host:5432/db': 'postgresql://host/db',
    'postgresql://me:SECRET@h1:1,h2/db\n': 'postgresql://h1,h2/db',
    'postgres://%2Frun/plants?PASSWORD=SECRET': 'postgres://%2Frun/plants',
    'other://me:SECRET@host/db': 'other://host/db',
    # Numbers in the place of a port may be a password.
    'postgresql://me:2024/db': 'postgresql://me/db',
    # Of a URL that is not well formed only the scheme is shown.
    'postgresql://me:2024!SECRET/db': 'postgresql:***',
    'jsonl:host=h PASSWORD = SECRET': 'jsonl:***',
    'SECRET://host/db': '***',
}


@pytest.mark.parametrize(('url', 'shown'), SHOWN.items())
def test_message_names_scheme_hosts_and_database(url, shown):
    """A message never shows more of a URL, however malformed the URL is."""
    assert masked(url) == shown


# With % where a password stands: anywhere but at a place that is well formed as a host
# or a path, from which nothing tells it apart.
PLACES = [
    *('//me:%@host/db', '//me:%/db', '//me:%', '//%@host/db', '//me@host:%/db'),
    *('//:%@', '//me@host/db?password=%', '//me@host/db?password = %', '//%@[x'),
    *('//me@host/db?%', '//me@host/db#%', '//me@host/db %', '//me@host/db?a=b&%=c'),
    *('//me@host/db?port=%', '//host/db?sslmode=%', '//me:1 %@host:1/x?y'),
    *('me:%@host/db', 'me:%', 'host=h password=% user=me', 'host=h password = %'),
]
SCHEMES = ['', *(f'{it}:' for it in ('postgres', 'POSTGRESQL', 'mysql', 'jsonl'))]
SCHEMES += ['postgresql', 'postgresql:', ' postgresql:', '"postgresql:']


@given(
    st.sampled_from(SCHEMES),
    st.sampled_from(PLACES),
    st.from_regex(r'[A-Z0-9][!-~ ]{4,20}[A-Za-z0-9]', fullmatch=True),
    st.booleans(),
)
@example('postgresql:', '//me:%/db', '2024!PW', False)
@example('postgresql:', '//me:%/db', '1 PW12', True)
def test_no_message_shows_a_password(scheme, place, password, is_quoted):
    """No message shows a password, wherever it stands in a URL, sound or broken."""
    written = quote(password, safe='') if is_quoted else password
    url = scheme + place.replace('%', written)
    shown = [masked(url), clean(f'"{password}", {written}: not {password!r}', url)]
    try:
        open_store(url, create=False).close()
    except ValueError as ex:
        shown += traceback.format_exception(ex)
    for text in password, written:
        assert text not in ''.join(shown)


def test_white_space_is_removed(path, monkeypatch):
    """As a .env file of Windows, an editor, a template, or a shell leaves it."""
    monkeypatch.chdir(path.parent)
    with open_store(f'jsonl:{path.name}') as store:
        store.add(Plant(1, 'Fern'))
    with open_store(f' jsonl: {path.name}\t\r\n', create=False) as store:
        assert [*store] == [Plant(1, 'Fern')]
