"""URLs of stores."""

from __future__ import annotations

import re


def masked(url: str) -> str:
    """Return the URL of a store as a log may show it, with ``***`` for its secrets.

    What might be one counts, since a URL with a fault in it is shown, too: a password
    with a character that should have been percent-encoded, a scheme that was left out.
    """
    url = re.sub('(password=)[^&]*', r'\1***', url, flags=re.DOTALL | re.IGNORECASE)
    # A path may have an @ in it.
    return re.sub(r'(^(?!jsonl:)\w*:/*|//).*@', r'\1***@', url, flags=re.DOTALL)
