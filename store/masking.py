"""What a message may show: of the URL of a store, and of the text of others."""

import re
from urllib.parse import unquote

_HOST = r'(?:(?:[\w.-]|%2[Ff])+|\[[\da-fA-F:.]+\])?(?::\d+)?'
_URL = rf'//(?:[^/?#@\s]*@)?({_HOST}(?:,{_HOST})*)(/[\w.~-]*)?(?:\?[^@#]*)?'
# C0, DEL, C1, line separators, and marks that change the direction of text.
_CONTROL = re.compile('[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')


def is_path(text: str) -> bool:
    """Whether a text cannot be a URL with a password (RFC 3986, section 4.2)."""
    return not re.search(r'(?is)^[^/]*:|//.*[:@?#]|password\s*=', text)


def masked(url: str) -> str:
    """Return of the URL of a store the scheme, hosts and database, or its path."""
    scheme, colon, rest = url.strip().partition(':')
    if not re.fullmatch('[a-z][a-z0-9+.-]*:', scheme + colon):
        return '***'
    if not rest or (scheme == 'jsonl' and is_path(rest)):
        return scheme + colon + rest
    if not (found := re.fullmatch(_URL, rest)):
        return f'{scheme}:***'
    hosts, path = found.groups('')
    # Without ports: in a URL that lacks its host, one may be the password.
    return f'{scheme}://' + re.sub(r':\d+(?=,|$)', '', hosts) + path


def escaped(text: str) -> str:
    """Return text with the escapes of JSON for its control characters."""
    if text.isprintable():  # nearly always, and ten times as fast
        return text
    return _CONTROL.sub(lambda match: f'\\u{ord(match[0]):04x}', text)


def clean(text: str, url: str = '') -> str:
    """Return text of others as one line, with ``***`` for what ``masked`` hides."""
    shown = {*re.findall(r'\w+', masked(url)), *re.findall(r'[?&]([a-z_]+)=', url)}
    hidden = {*re.findall(r'\w+', f'{url} {unquote(url)}')} - shown
    text = re.sub(r'\w+', lambda word: '***' if word[0] in hidden else word[0], text)
    return escaped(' '.join(text.split()))
