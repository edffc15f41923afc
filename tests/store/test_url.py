"""Store URLs: errors say what is wrong, and never show a secret."""

import traceback

import pytest

from store import masked, open_store


@pytest.mark.parametrize(
    ('url', 'shown'),
    [
        ('memory:', 'memory:'),
        ('jsonl:/a:b@c', 'jsonl:/a:b@c'),
        ('nosql://host/db', 'nosql://host/db'),
        ('nosql://me@host/db', 'nosql://***@host/db'),
        ('nosql://me:SECRET@host:5432/db', 'nosql://***@host:5432/db'),
        ('nosql://:SECRET@host', 'nosql://***@host'),
        ('nosql://me:SEC/R@E:T\n@h1,h2/db', 'nosql://***@h1,h2/db'),
        ('x://h/db?password=SECRET&a=b', 'x://h/db?***'),
        ('x://h/db?a=b&sslPassword=SECRET', 'x://h/db?***'),
        ('x://me:SECRET/db', 'x://me:***/db'),
        ('me:SECRET@host/db', 'me:***@host/db'),
        ('x://h:1/db?password=SECRET@SECRET', 'x://***'),
        ('x:host=h password=SECRET user=me', 'x:host=h password=***'),
        ('postgres:///plants?host=/run&password=SECRET', 'postgres:///plants?***'),
        ('nosql://me:SE?CRET@host/db', 'nosql://***'),
        ('', ''),
    ],
)
def test_masked_url_shows_no_secret(url, shown):
    """A masked URL shows no secret, however malformed the URL is."""
    assert masked(url) == shown


@pytest.mark.parametrize(
    'url',
    [
        *(f'postgresql://me:top{sign}secret@host/db' for sign in '@/?#%'),
        'postgresql:gardener:secret@host/plants',
        'postgresql://host/plants?password=top@secret',
        'postgresql://host/plants?pasword=secret',
        'postgres://gardener:top@\nsecret@host/plants',
        'postgresql://gardener:top/\nsecret@host/plants',
        'postgresql://host:secret@port/plants?x=y',
        'postgresql://gardener:secret/plants',
        'mysql://gardener:secret@host/plants',
        '//gardener:secret@host',
        'gardener:secret@host',
        'jsonl:',
        'memory:plants',
        '',
    ],
)
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
