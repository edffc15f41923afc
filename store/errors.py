"""What a plant store raises."""

from __future__ import annotations


class StoreError(Exception):
    """The root of everything that a store raises on purpose."""


class IdTaken(StoreError):
    """A different plant holds the id; the store is unchanged.

    Attributes:
        id: The id that both plants want.
    """

    def __init__(self, id: int) -> None:
        super().__init__(f'id: {id} is taken by a different plant')
        self.id = id


class StoreUnavailable(StoreError):
    """The store cannot take plants now.

    The plant may or may not be there afterwards, never half of it: repeat the call.

    Attributes:
        reason: What is wrong; it names no path, so that a client may see it.
        store: What it is wrong with, a path for example; part of the message.
        retry_after: When to try again, in seconds.
        detail: What else an operator should know; part of the message.
    """

    def __init__(
        self, reason: str, *, store: str = '', retry_after: int = 1, detail: str = ''
    ) -> None:
        message = f'{store}: {reason}' if store else reason
        super().__init__(f'{message} ({detail})' if detail else message)
        self.reason = reason
        self.store = store
        self.retry_after = retry_after
        self.detail = detail

    @classmethod
    def refused(cls, error: OSError, store: object) -> StoreUnavailable:
        """Return what the operating system refuses in the words of the store."""
        return cls(error.strerror or str(error), store=str(store))


class StoreCorrupt(StoreError):
    """A stored plant cannot be read, and it is not a torn tail.

    Attributes:
        path: The damaged file.
        line: The number of its first damaged line, counted from 1.
        offset: Where that line begins, in bytes from the start of the file.
        reason: Why the line is not a record.
    """

    def __init__(self, path: str, line: int, offset: int, reason: str) -> None:
        super().__init__(
            f'{path}: line {line} (byte {offset}) is damaged: {reason}; '
            f'nothing was changed; to move damaged lines to a side file: '
            f'python -m store check --repair jsonl:{path}'
        )
        self.path = path
        self.line = line
        self.offset = offset
        self.reason = reason


class StoreClosed(StoreError):
    """The store was used after ``close``."""

    def __init__(self) -> None:
        super().__init__('the store is closed')
