"""The exceptions that a plant store raises."""

import shlex
from typing import NamedTuple, Self


class StoreError(Exception):
    """The base class of all that a store raises on purpose."""


class IdTaken(StoreError):
    """A different plant holds the ``id``; the store is unchanged."""

    def __init__(self, id: int, differs: str = '') -> None:
        super().__init__(f'id: {id} is taken by a different plant{differs}')
        self.id = id

    @classmethod
    def between(cls, stored: NamedTuple, offered: NamedTuple) -> Self:
        """Return the error for two plants with one id; it has none of their values."""
        both = zip(stored._fields, stored, offered, strict=True)
        names = ', '.join(name for name, one, other in both if one != other)
        return cls(stored[0], f': it differs in {names}')


class StoreUnavailable(StoreError):
    """The store takes no plants now: repeat the call. Clients may see ``reason``."""

    def __init__(self, reason: str, *, store: str = '', detail: str = '') -> None:
        message = f'{store}: {reason}' if store else reason
        super().__init__(f'{message} ({detail})' if detail else message)
        self.reason, self.store, self.detail = reason, store, detail


class StoreCorrupt(StoreError):
    """A stored line is damaged, and it is not a torn tail."""

    def __init__(self, path: str, line: int, offset: int, reason: str) -> None:
        super().__init__(
            f'{path}: line {line} (byte {offset}) is damaged: {reason}; '
            f'nothing was changed; to move damaged lines to a side file: '
            f'python -m store check --repair {shlex.quote(f"jsonl:{path}")}'
        )
        self.line = line  # the first damaged one, counted from 1
        self.offset = offset  # where it begins, in bytes from the start of the file


class StoreClosed(StoreError):
    """The store was used after ``close``."""

    def __init__(self) -> None:
        super().__init__('the store is closed')
