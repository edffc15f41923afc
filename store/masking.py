"""Showing the URL of a store without its secrets."""

import re

# jsonl: is left out where its path may have the same characters.
SECRETS = [
    r'(^(?!jsonl:)\w*:/*|//).*\?.*@.*',
    r'(^(?!jsonl:)\w*:/*|//).*(?=@)',
    r'(^(?!jsonl:).*\?).*',
    r'(//[^/@]*:)(?![0-9]+\b)[^/]*',  # a password, where the host was left out
    r'(password=).*',
]


def masked(url: str) -> str:
    """Return the URL of a store as a log may show it, with ``***`` for its secrets.

    All that may be a secret is hidden, since faulty URLs are shown, too: the scheme may
    be missing, or a password may have a character that should be percent-encoded.
    """
    for secret in SECRETS:
        url = re.sub(secret, r'\1***', url, flags=re.DOTALL | re.IGNORECASE)
    return url
