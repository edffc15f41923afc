"""The answer to ``pip install .``: this is a checkout, and not a package."""

raise SystemExit(
    'The plant store is no package: its checkout is served by "make run", and '
    'embedded as docs/embedding.md says.'
)
