"""URLs of stores."""

from __future__ import annotations

import re

DEFAULT_URL = 'jsonl:plants.jsonl'

# The path of a file may have any of these characters.
SECRETS = [
    re.compile(pattern, re.DOTALL | re.IGNORECASE)
    for pattern in (
        r'(^(?!jsonl:)\w*:/*|//).*\?.*@.*',
        r'(^(?!jsonl:)\w*:/*|//).*(?=@)',
        r'(^(?!jsonl:).*\?).*',
        r'(//[^/@]*:)(?![0-9]+\b)[^/]*',  # a port that is none: the host was left out
        r'(password=).*',
    )
]


def masked(url: str) -> str:
    """Return the URL of a store as a log may show it, with ``***`` for its secrets.

    What might be one counts, since a URL with a fault in it is shown, too: a password
    with a character that should have been percent-encoded, a scheme that was left out.
    """
    for secret in SECRETS:
        url = secret.sub(r'\1***', url)
    return url
