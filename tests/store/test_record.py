"""The format of a record: encode, decode, and scan for ids."""

import json

import pytest
from contract import HOSTILE, IDS
from hypothesis import example, given
from hypothesis import strategies as st

from store import Plant
from store.jsonl.record import DamagedRecord, decode, encode, scan

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


# Valid records, and their plants.
VALID = {
    'ours': (b'{"id":1,"name":"Fern"}\n', Plant(1, 'Fern')),
    'largest': (b'{"id":9223372036854775807,"name":""}\n', Plant(2**63 - 1, '')),
    'minus-zero': (b'{"id":-0,"name":""}\n', Plant(0, '')),
    'white-space': (b' {\t"id" : 1 ,\r"name" : "" } \r\n', Plant(1, '')),
    'order': (b'{"tag":"b","name":"a","id":1}\n', Plant(1, 'a', 'b')),
    'members': (b'{"id":1,"name":"a","x":[null,{"id":2}]}\n', Plant(1, 'a')),
    'names-differ': (b'{"id":1,"name":"a","Tag":0,"ID":0}\n', Plant(1, 'a')),
    'escaped': (b'{"id":1,"name":"\\u00e9\\/\\"\\n"}\n', Plant(1, 'é/"\n')),
    'pair': (b'{"id":1,"name":"\\ud83c\\udf31"}\n', Plant(1, '🌱')),
    'long-number': (b'{"id":1,"name":"","x":%b}\n' % (b'1' * 5000), Plant(1, '')),
    'no-line-feed': (b'{"id":1,"name":"a"}', Plant(1, 'a')),
}

# Lines that are not records.
INVALID = {
    'torn': b'{"id":1,"na',
    'zeros': bytes(100) + b'\n',
    'zero-at-end': b'{"id":1,"name":"a"}\0\n',
    'two': b'{"id":1,"name":"a"}{"id":2,"name":"b"}\n',
    'control': b'{"id":1,"name":"\x1f"}\n',
    'nan': b'{"id":1,"name":"a","x":NaN}\n',
    'byte-order-mark': b'\xef\xbb\xbf{"id":1,"name":"a"}\n',
    'nested': b'{"id":1,"name":"a","x":' + b'[' * 100_000 + b'\n',
    'latin-1': b'{"id":1,"name":"\xe9"}\n',
    'encoded-surrogate': b'{"id":1,"name":"\xed\xa0\x80"}\n',
    'array': b'[{"id":1,"name":"a"}]\n',
    'float-id': b'{"id":1.0,"name":"a"}\n',
    'too-large': b'{"id":9223372036854775808,"name":"a"}\n',
    'endless': b'{"id":%b,"name":"a"}\n' % (b'9' * 4301),
    'no-name': b'{"id":1}\n',
    'null-tag': b'{"id":1,"name":"a","tag":null}\n',
    'nul-name': b'{"id":1,"name":"a\\u0000"}\n',
    'surrogate': b'{"id":1,"name":"\\ud800"}\n',
}


@pytest.mark.parametrize(('line', 'plant'), VALID.values(), ids=VALID)
def test_valid_line_is_decoded(line, plant):
    """A line that follows the format is a record, also in a form we never write."""
    assert decode(line) == plant
    if line.endswith(b'\n'):
        assert scan(line, 100) == ([plant.id], [100], 100 + len(line))
    else:  # it may be a part of a record
        assert scan(line, 100) == ([], [], 100)


def decode_lines(chunk):
    """Return what a scan should return, by decoding line by line."""
    ids, offsets, end = [], [], 0
    for line in chunk.split(b'\n')[:-1]:
        if line.strip(b' \t\r'):
            try:
                ids.append(decode(line + b'\n').id)
            except DamagedRecord:
                break
            offsets.append(end + 100)
        end += len(line) + 1
    return ids, offsets, end + 100


@pytest.mark.parametrize('line', INVALID.values(), ids=INVALID)
def test_invalid_line_is_refused(line):
    """A line that breaks the format is damaged, and ends a scan."""
    with pytest.raises(DamagedRecord):
        decode(line)
    first = encode(Plant(7, 'Gräser'))
    sound = first + encode(Plant(8, 'a"b'))
    assert scan(sound + line, 0) == ([7, 8], [0, len(first)], len(sound))


WHOLE = [line for line, _ in VALID.values() if line.endswith(b'\n')]
WHOLE += [b'\n', b' \t\r\n', *(encode(Plant(1, text, text)) for text in HOSTILE)]
LINES = st.one_of(
    PLANTS.map(encode),
    st.integers().map(b'{"id":%d,"name":"a"}\n'.__mod__),
    st.sampled_from(WHOLE),
)


def damaged(plant, place, byte):
    """Return a record with another byte somewhere."""
    line = bytearray(encode(plant))
    line[place % len(line)] = byte
    return bytes(line).rstrip(b'\n') + b'\n'


BROKEN = st.one_of(
    st.sampled_from([line for line in INVALID.values() if line.endswith(b'\n')]),
    st.binary(max_size=40).map(lambda data: data.replace(b'\n', b'') + b'\n'),
    st.builds(damaged, PLANTS, st.integers(0, 500), st.integers(0, 255)),
)


@given(st.lists(LINES, max_size=8), st.lists(BROKEN, max_size=1), st.lists(LINES))
def test_scan_equals_decode(before, broken, after):
    """A scan finds the records that decoding line by line finds."""
    chunk = b''.join([*before, *broken, *after])
    assert scan(chunk, 100) == decode_lines(chunk)
