"""The embedded store: a file of JSON lines, shared by any number of processes."""

from __future__ import annotations

from store.jsonl.file import JSONLinesStore

__all__ = ['JSONLinesStore']
