"""How hypothesis runs. The import is slow, and other tests do without it."""

from hypothesis import settings

# A deadline would fail on a busy machine, and a database would make runs differ.
settings.register_profile('tests', deadline=None, database=None, max_examples=60)
settings.load_profile('tests')
