"""Store URLs: errors say what is wrong, and never show a secret."""

import traceback
from contextlib import redirect_stderr
from io import StringIO
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from store import masked, open_store
from store.__main__ import main
from store.masking import clean
from web.settings import Settings

SHOWN = {
    'memory:': 'memory:',
    'jsonl:/a:b@c': 'jsonl:/a:b@c',
    'jsonl:a b/c=d.jsonl': 'jsonl:a b/c=d.jsonl',
    'postgresql://host/db': 'postgresql://host/db',
    'postgresql://me@host/db': 'postgresql://***@host/db',
    'postgresql://me:SECRET@host:5432/db': 'postgresql://***@host/db',
    'postgresql://:SECRET@[::1]:5432': 'postgresql://***@[::1]',
    'postgresql://me:SECRET@h1:1,h2/db': 'postgresql://***@h1,h2/db',
    'postgresql://h/db?a=b&sslPassword=SECRET': 'postgresql://h/db?***',
    'postgres:///plants?host=/run&PASSWORD=SECRET': 'postgres:///plants?***',
    'postgresql://me@%2Frun%2Fpg:5432/db': 'postgresql://***@%2Frun%2Fpg/db',
    # Numbers in the place of a port may be a password.
    'postgresql://me:2024/db': 'postgresql://me/db',
    # Of a URL that is not well formed only a known scheme is shown.
    'postgresql://me:2024!SECRET/db': 'postgresql:***',
    'postgresql://me:1%20SECRET/db': 'postgresql:***',
    'postgresql://me:SEC/R@E:T\n@h1,h2/db': 'postgresql:***',
    'postgresql://h:1/db?password=SECRET@SECRET': 'postgresql:***',
    'postgresql://me@host/db#SECRET': 'postgresql:***',
    'postgresql://host/db password = SECRET': 'postgresql:***',
    'postgresql:SECRET': 'postgresql:***',
    'memory:SECRET': 'memory:***',
    'jsonl:me:SECRET@host/db': 'jsonl:***',
    'jsonl:host=h PASSWORD = SECRET': 'jsonl:***',
    'jsonl://me\n:SECRET@host': 'jsonl:***',
    'me:SECRET@host/db': 'me:***',
    'other://me:SECRET@host/db': 'other://***@host/db',
    'SECRET://host/db': '***',
    'SECRET': '***',
    '': '***',
}


@pytest.mark.parametrize(('url', 'shown'), SHOWN.items())
def test_masked_url_shows_only_what_is_harmless(url, shown):
    """A masked URL shows no secret, however malformed the URL is."""
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
SCHEMES += ['postgresql', 'postgresql:']


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
    shown = [masked(url), repr(Settings(store=url))]
    shown.append(clean(f'"{password}", {written}: not {password!r}', url))
    try:
        Settings.from_environ({'PLANTS_STORE': url})
    except ValueError as ex:
        shown += traceback.format_exception(ex)
        with redirect_stderr(StringIO()) as printed, pytest.raises(SystemExit):
            main(['list', url])
        shown.append(printed.getvalue())
    for text in password, written:
        assert text not in ''.join(shown)


# The password, a text, and what is shown of it.
CLEANED = [
    ('S3cret-w0rd', 'near S3cret', 'near ***'),
    ('S3cret-q', 'near S3cret-q', 'near ***'),
    ('a\\b', r"near 'a\\b'", "near '***'"),
    ('so', 'some\nalso', 'some also'),
]


@pytest.mark.parametrize(('password', 'text', 'shown'), CLEANED)
def test_part_of_a_password_is_hidden(password, text, shown):
    """A part of a password, and as repr() writes it; not in another word."""
    assert clean(text, f'x://me:{password}@host') == shown


MALFORMED = [
    *(f'postgresql://me:top{sign}secret@host/db' for sign in '@/?#%'),
    *('postgresql:gardener:secret@host/plants', 'postgresql://gardener:secret/plants'),
    *('postgresql://host/plants?password=top@secret', 'gardener:secret@host'),
    *('postgresql://host/plants?pasword=secret', '//gardener:secret@host', 'jsonl:'),
    *('postgres://gardener:top@\nsecret@host/plants', 'memory:plants', ''),
    *('postgres://gardener:top/\nsecret@host/plants', 'mysql://me:secret@host/plants'),
    *('postgresql://host:secret@port/plants?x=y', 'postgresql://me@host/db?secret'),
]


@pytest.mark.parametrize('url', MALFORMED)
def test_malformed_url_is_refused(url):
    """A malformed URL is refused, and the error shows no secret."""
    with pytest.raises(ValueError, match=r'is not a|percent-encode') as caught:
        open_store(url)
    assert 'secret' not in ''.join(traceback.format_exception(caught.value))


@pytest.mark.parametrize('scheme', ['postgresql', 'postgres'])
def test_at_in_a_parameter_is_escaped(scheme):
    """An @ in a parameter must be escaped; the error says how. Two schemes are one."""
    url = f'{scheme}://gardener:%40secret@host/plants?application_name=me'
    with open_store(url + '%40here'):
        pass
    with pytest.raises(ValueError, match=r'% as %25, @ %40, / %2F, \? %3F, # %23'):
        open_store(url + '@here')
