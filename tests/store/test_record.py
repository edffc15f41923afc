"""The format of a record: encode, decode, and scan for ids."""

import json
from functools import partial

import pytest
from contract import HOSTILE, IDS
from disk import assert_raise
from hypothesis import example, given
from hypothesis import strategies as st

from store import Plant
from store.jsonl.record import decode, encode, scan

# The text of a plant: Unicode without U+0000 and lone surrogates.
TEXTS = st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\0'))
INT64 = st.integers(-(2**63), 2**63 - 1)
PLANTS = st.builds(Plant, INT64 | st.sampled_from(IDS), TEXTS, st.none() | TEXTS)


@given(PLANTS)
@example(Plant(-7, 'Gräser 🌱 \u2028\ufeff\x7f/', '"\\\b\f\n\r\t\x01\x1f'))
def test_record_is_compact_json(plant):
    """A record is JSON in UTF-8 without needless bytes, and is decoded as the plant."""
    line = encode(plant)
    members = {name: it for name, it in plant._asdict().items() if it is not None}
    text = json.dumps(members, ensure_ascii=False, separators=(',', ':'))
    assert line == text.encode() + b'\n'
    assert decode(line) == plant


# Lines that we never write, and their plants: none if the line is no record.
KNOWN = {
    b'{"id":-0,"name":""}\n': Plant(0, ''),
    b' {\t"id" : 1 ,\r"name" : "" } \r\n': Plant(1, ''),
    b'{"tag":"b","name":"a","id":1}\n': Plant(1, 'a', 'b'),
    b'{"id":1,"name":"a","x":[null,{"id":2}],"Tag":0,"ID":0}\n': Plant(1, 'a'),
    b'{"id":1,"name":"\\u00e9\\/\\"\\n\\ud83c\\udf31"}\n': Plant(1, 'é/"\n🌱'),
    b'{"id":1,"name":"","x":%b}\n' % (b'1' * 5000): Plant(1, ''),
}
NONE = [
    *(b'{"id":1,"na', bytes(100) + b'\n', b'{"id":1,"name":"a"}\0\n', b'null\n'),
    *(b'\xef\xbb\xbf{"id":1,"name":"a"}\n', b'[{"id":1,"name":"a"}]\n', b'{"id":1}\n'),
    *(b'{"id":1,"name":"a"}{"id":2,"name":"b"}\n', b'{"id":1,"name":"a","x":NaN}\n'),
    *(b'{"id":1,"name":"\xe9"}\n', b'{"id":1,"name":"\xed\xa0\x80"}\n'),
    *(b'{"id":1.0,"name":"a"}\n', b'{"id":9223372036854775808,"name":"a"}\n'),
    *(b'{"id":1,"name":"a\\u0000"}\n', b'{"id":1,"name":"\\ud800"}\n'),
    *(b'{"id":01,"name":"a"}\n', b'{"id":1,"name":"a\tb"}\n', b'{"id":1,"name":a"}\n'),
    *(b'{"id":1,"name":"a","tag":null}\n', b'{"id":1,"name":"a",}\n'),
    b'{"id":1,"name":"a","x":' + b'[' * 100_000 + b'\n',
    b'{"id":%b,"name":"a"}\n' % (b'9' * 4301),
]


@pytest.mark.parametrize('line', [*KNOWN, *NONE], ids=len)
def test_line_is_decoded_or_refused(line):
    """A line that follows the format is a record; another one ends a scan."""
    first = encode(Plant(7, 'Gräser'))
    sound = first + encode(Plant(8, 'a"b'))
    found, end = [(7, 0), (8, len(first))], len(sound)
    if plant := KNOWN.get(line):
        assert decode(line) == decode(line[:-1]) == plant
        found, end = [*found, (plant.id, end)], end + len(line)
    else:
        assert_raise(ValueError, partial(decode, line))
    assert scan(sound + line, 0) == (found, end)


WHOLE = [*KNOWN, b'\n', b' \t\r\n']
WHOLE += [encode(Plant(1, text, text)) for text in HOSTILE]
LINES = st.one_of(
    PLANTS.map(encode),
    st.integers().map(b'{"id":%d,"name":"a"}\n'.__mod__),
    st.sampled_from(WHOLE),
)
BROKEN = st.one_of(
    st.sampled_from(NONE[1:]),
    st.binary(max_size=40).map(lambda data: data.replace(b'\n', b'') + b'\n'),
)


@given(st.lists(LINES, max_size=8), st.lists(BROKEN, max_size=1), st.lists(LINES))
def test_scan_equals_decode(before, broken, after):
    """A scan finds the records that decoding line by line finds."""
    found, end = [], 100
    lines = [*before, *broken, *after]
    for line in lines:
        if line.strip(b' \t\r\n'):
            try:
                found.append((decode(line).id, end))
            except ValueError:
                break
        end += len(line)
    assert scan(b''.join(lines), 100) == (found, end)
    # A last line without its line feed may be a part of a record.
    assert scan(encode(Plant(1, 'a'))[:-1], 100) == ([], 100)
