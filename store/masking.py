"""What a message may show: of the URL of a store, and of the text of others."""

import os
import re
from urllib.parse import unquote

# The rest of a well-formed URL. A number in the place of a port is not shown: it may be
# the password of a URL that lacks its host.
_HOST = r'(?:(?:[\w.-]|%2[Ff])+|\[[\da-fA-F:.]+\])?(?::\d+)?'
_AUTHORITY = rf'//([^/?#@\s]*@)?({_HOST}(?:,{_HOST})*)(/[\w.~-]*)?(\?[^@#]*)?'
# C0, DEL, C1, line separators, and marks that change the direction of text.
_CONTROL = re.compile('[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')


def is_path(text: str) -> bool:
    """Whether a text exists as a path, or cannot be a URL (RFC 3986, section 4.2)."""
    is_url = re.search(r'(?is)^[^/]*:|//.*[:@?#]|password\s*=', text)
    return not is_url or os.path.exists(text)


def masked(url: str) -> str:
    """Return the URL of a store as a message may show it, with ``***`` for the rest.

    It shows the scheme and, of a well-formed URL, the hosts and the path.
    """
    scheme, colon, rest = url.partition(':')
    if not re.fullmatch('[a-z][a-z0-9+.-]*:', scheme + colon):
        return '***'
    if not rest or (scheme == 'jsonl' and is_path(rest)):
        return url
    if not (found := re.fullmatch(_AUTHORITY, rest)):
        return f'{scheme}:***'
    user, ports, path, query = found.groups('')
    hosts = re.sub(r':\d+(?=,|$)', '', ports)
    return f'{scheme}://{user and "***@"}{hosts}{path}{query and "?***"}'


def escaped(text: str) -> str:
    """Return text with the escapes of JSON for its control characters."""
    if text.isprintable():  # nearly always, and ten times as fast
        return text
    return _CONTROL.sub(lambda match: f'\\u{ord(match[0]):04x}', text)


def clean(text: str, url: str = '') -> str:
    """Return text of a server, a library or a client as a message may show it.

    The result is one line without control characters. Each part of ``url`` that
    ``masked`` hides is ``***``: verbatim, percent-decoded, or as ``repr`` writes it.
    """
    parts = {*re.split(r'[:/?#@&=,\s]+', url), *re.findall(r'\w{3,}', url)}
    parts |= set(map(unquote, parts))
    parts |= {repr(part)[1:-1] for part in parts}
    harmless = {'', *re.split(r'[]:/@,?[]+', masked(url))}
    harmless.update([*map(unquote, harmless), *re.findall(r'[?&]([a-z_]+)=', url)])
    longest_first = sorted(parts - harmless, key=len, reverse=True)
    hidden = '|'.join(map(re.escape, longest_first)) or '(?!)'
    text = re.sub(rf'(?<!\w)(?:{hidden})(?!\w)', '***', text)
    return escaped(' '.join(text.split()))
