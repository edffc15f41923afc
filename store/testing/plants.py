"""Plants that a store may change, and values that are no plants: for the tests."""

from typing import Any

from store import Plant

IDS = [
    *(0, 1, -1, 9, 10, 2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1),
    *(2**bits + near for bits in (31, 32, 53) for near in (-1, 0, 1)),
    *(-(2**bits) + near for bits in (31, 32, 53) for near in (-1, 0, 1)),
]

# Texts that a file, a database or a program may take for something else.
HOSTILE = [
    *('', ' \t ', '  Fern  ', 'null', 'NULL', '{"a,b",NULL}', '\ufeffFern'),
    'a\nb\rc\r\nd\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\n',
    '"\\"/\'`\\\\',
    '\\u0000 \\ud800 \\n \\N \\. \\x00 %00 &#0;',
    '{"id":1,"name":"x"}\n{"id":2,"name":"y"}\n',
    "'); DROP TABLE plants; --",
    '%s %(name)s {} {0} $1 :name ?',
    '\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301',
]

FERN, MOSS = Plant(1, 'Fern'), Plant(2, 'Moss')

# Different plants, also with the same id.
SIMILAR = [
    *(Plant(0, 'Fern', tag) for tag in (None, '', 'shade', 'null', 'None')),
    *(Plant(0, name) for name in ('fern', 'Fern ', 'Fern\n', 'x' * 5000, 'x' * 5001)),
    *(Plant(0, name) for name in ('\u00e9', 'e\u0301', '\u212b', '\u00c5')),
    Plant(0, '', 'Fern'),
]

_new: Any = Plant  # with arguments of wrong types
NO_PLANTS: list[Plant] = [
    *(_new(id, 'Fern') for id in (True, 1.0, '1', None, 2**63, -(2**63) - 1)),
    *(_new(2, name) for name in (None, b'Fern', 5, 'Fe\0rn', 'Fern\udc80')),
    *(_new(2, 'Fern', tag) for tag in (5, False, b'', 'sha\0de', '\ud800shade')),
]


def samples() -> list[Plant]:
    """Return plants that have every kind of id and text, also a megabyte."""
    long = [character * 2**20 for character in 'x"\x01\U0001f331']
    points = [*range(1, 0xD800), *range(0xE000, 0x110000)]  # without the surrogates
    characters = ''.join(map(chr, points))
    parts = [characters[at : at + 2**16] for at in range(0, len(characters), 2**16)]
    texts = [*HOSTILE, *long, *parts]
    plants = [Plant(id, 'Fern', 'shade') for id in IDS]
    for id, text in enumerate(texts, 7000):
        plants += Plant(id, text), Plant(-id, 'Fern', text)
    return plants
