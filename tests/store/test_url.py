"""Store URLs: errors say what is wrong, and never show a secret."""

import itertools
import random
import traceback
from urllib.parse import quote

import pytest

from store import masked, open_store
from store.masking import clean

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
PASSWORDS = ['2024!PW', '1 PW12', 'A\'b"c', '7@h:1/x?y=Z', 'Pa#ss%w0', "Q'=\\ 'z9"]


def test_no_message_shows_a_password():
    """No message shows a password, wherever it stands in a URL, sound or broken."""
    chance = random.Random(1)
    for scheme, place, password in itertools.product(SCHEMES, PLACES, PASSWORDS):
        encoded = ''.join(f'%{ord(character):02X}' for character in password)
        written = chance.choice([password, quote(password, safe=''), encoded])
        url = scheme + place.replace('%', written)
        shown = [masked(url), clean(f'"{password}", {written}: not {password!r}', url)]
        if chance.random() < 0.05:  # it looks for packages
            try:
                open_store(url, create=False).close()
            except ValueError as ex:
                shown += traceback.format_exception(ex)
        for text in password, written:
            assert text not in ''.join(shown), url
