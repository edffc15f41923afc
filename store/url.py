"""URLs of stores."""

from __future__ import annotations

import re


def masked(url: str) -> str:
    """Return a URL as it may be shown: without a user, a password or parameters.

    It need not be a valid one: a password with a character that should have been
    percent-encoded is the usual reason for a URL to be shown at all.
    """
    return re.sub('//.*@', '//...@', url.partition('?')[0], flags=re.DOTALL)
