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


@pytest.mark.parametrize('character', '@/?#%')
def test_unescaped_password_is_refused(character):
    """A password that breaks the URL is refused with the reason, and not shown."""
    url = f'postgresql://gardener:topmost{character}secret@127.0.0.1/plants'
    with pytest.raises(ValueError, match=r'write @ as %40|not a URL') as caught:
        open_store(url)
    shown = ''.join(traceback.format_exception(caught.value))
    assert 'topmost' not in shown
    assert 'secret' not in shown


@pytest.mark.parametrize(
    'url',
    [
        'postgresql:gardener:secret@host/plants',
        'mysql://gardener:secret@host/plants',
        'postgresql://host/plants?password=top@secret',
        'postgresql://host/plants?pasword=secret',
        'postgresql://gardener:top@secret@host/plants',
        'postgresql://gardener:top@\nsecret@host/plants',
        'postgresql://gardener:top/\nsecret@host/plants',
        'postgresql://host:secret@port/plants?x=y',
        '//gardener:secret@host',
        'gardener:secret@host',
        'postgresql://gardener:secret/plants',
    ],
)
def test_malformed_url_is_refused(url):
    """A malformed URL is refused, and the error shows no secret."""
    with pytest.raises(ValueError, match=r'is not a|in a user or') as caught:
        open_store(url)
    assert 'secret' not in ''.join(traceback.format_exception(caught.value))


@pytest.mark.parametrize('at', ['', 'gardener:%40secret@'])
def test_unescaped_at_in_a_parameter_is_refused(at):
    """An @ in a parameter must be escaped; the error says how."""
    url = f'postgresql://{at}host/plants?application_name=me'
    with open_store(url + '%40here'):
        pass
    with pytest.raises(ValueError, match='in this URL write @ as %40, except before'):
        open_store(url + '@here')
