"""URLs of stores."""

from __future__ import annotations

import re


def masked(url: str) -> str:
    """Return the URL of a store as a log may show it: every password is ``***``.

    What might be one counts, since a URL with a fault in it is shown, too: all from the
    first colon of ``//USER:PASSWORD@`` to the last ``@``, and what follows
    ``password=``.
    """
    url = re.sub('(//[^:/@]*:).*@', r'\1***@', url, flags=re.DOTALL)
    return re.sub(r'(password=)[^&\s]*', r'\1***', url, flags=re.IGNORECASE)
