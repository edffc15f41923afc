"""The format of a record: encode, decode, and scan for ids."""

import json

import pytest
from contract import HOSTILE, IDS
from hypothesis import example, given
from hypothesis import strategies as st

from store import Plant
from store.jsonl import record
from store.jsonl.record import DamagedRecord, decode, encode, scan_ids

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
    'smallest': (b'{"id":-9223372036854775808,"name":""}\n', Plant(-(2**63), '')),
    'largest': (b'{"id":9223372036854775807,"name":""}\n', Plant(2**63 - 1, '')),
    'minus-zero': (b'{"id":-0,"name":""}\n', Plant(0, '')),
    'white-space': (b' {\t"id" : 1 ,\r"name" : "" } \r\n', Plant(1, '')),
    'order': (b'{"tag":"b","name":"a","id":1}\n', Plant(1, 'a', 'b')),
    'members': (b'{"id":1,"name":"a","x":[null,{"id":2}]}\n', Plant(1, 'a')),
    'names-differ': (b'{"id":1,"name":"a","Tag":0,"ID":0}\n', Plant(1, 'a')),
    'escaped-member': (b'{"\\u0069d":1,"name":"a"}\n', Plant(1, 'a')),
    'escaped': (b'{"id":1,"name":"\\u00e9\\/\\"\\n"}\n', Plant(1, 'é/"\n')),
    'pair': (b'{"id":1,"name":"\\ud83c\\udf31"}\n', Plant(1, '🌱')),
    'long-number': (b'{"id":1,"name":"","x":%b}\n' % (b'1' * 5000), Plant(1, '')),
    'large-exponent': (b'{"id":1,"name":"","x":1e999}\n', Plant(1, '')),
    'no-line-feed': (b'{"id":1,"name":"a"}', Plant(1, 'a')),
    'carriage-return': (b'{"id":1,"name":"a"}\r', Plant(1, 'a')),
}

NOT_JSON, NOT_UTF8 = 'it is not JSON', 'it is not UTF-8'
NOT_AN_OBJECT = 'it is not a JSON object'
NO_INT64 = 'id: it is not a 64-bit integer'

# Lines that are not records, and the reasons.
INVALID = {
    'torn': (b'{"id":1,"na', NOT_JSON),
    'empty': (b'\n', NOT_JSON),
    'zeros': (bytes(100) + b'\n', NOT_JSON),
    'zero-at-end': (b'{"id":1,"name":"a"}\0\n', NOT_JSON),
    'open-string': (b'{"id":1,"name":"a}\n', NOT_JSON),
    'two': (b'{"id":1,"name":"a"}{"id":2,"name":"b"}\n', NOT_JSON),
    'leading-zero': (b'{"id":01,"name":"a"}\n', NOT_JSON),
    'minus': (b'{"id":-,"name":"a"}\n', NOT_JSON),
    'control': (b'{"id":1,"name":"\x1f"}\n', NOT_JSON),
    'tab': (b'{"id":1,"name":"\t"}\n', NOT_JSON),
    'nan': (b'{"id":1,"name":"a","x":NaN}\n', NOT_JSON),
    'byte-order-mark': (b'\xef\xbb\xbf{"id":1,"name":"a"}\n', NOT_JSON),
    'nested': (b'{"id":1,"name":"a","x":' + b'[' * 100_000 + b'\n', NOT_JSON),
    'latin-1': (b'{"id":1,"name":"\xe9"}\n', NOT_UTF8),
    'encoded-surrogate': (b'{"id":1,"name":"\xed\xa0\x80"}\n', NOT_UTF8),
    'null': (b'null\n', NOT_AN_OBJECT),
    'array': (b'[{"id":1,"name":"a"}]\n', NOT_AN_OBJECT),
    'no-id': (b'{"name":"a"}\n', 'id: None is not an integer'),
    'float-id': (b'{"id":1.0,"name":"a"}\n', 'id: 1.0 is not an integer'),
    'too-large': (b'{"id":9223372036854775808,"name":"a"}\n', NO_INT64),
    'too-small': (b'{"id":-9223372036854775809,"name":"a"}\n', NO_INT64),
    'endless': (b'{"id":%b,"name":"a"}\n' % (b'9' * 4301), NO_INT64),
    'no-name': (b'{"id":1}\n', 'name: None is not a string'),
    'null-tag': (b'{"id":1,"name":"a","tag":null}\n', 'tag: null is not a string'),
    'array-tag': (b'{"id":1,"name":"a","tag":["b"]}\n', "tag: ['b'] is not a string"),
    'nul-name': (b'{"id":1,"name":"a\\u0000"}\n', 'name: it holds U+0000'),
    'surrogate': (b'{"id":1,"name":"\\ud800"}\n', 'name: it holds a lone surrogate'),
}


@pytest.mark.parametrize(('line', 'plant'), VALID.values(), ids=VALID)
def test_valid_line_is_decoded(line, plant):
    """A line that follows the format is a record, also in a form we never write."""
    assert decode(line) == plant
    assert list(scan_ids(line, 100)) == [(plant.id, 100)]


@given(st.integers())
def test_integer_of_any_member_is_exact(number):
    """A member that is an integer has its value, also one that means nothing yet."""
    assert record._decode(f'{{"x":{number}}}') == {'x': number}


def decode_lines(chunk):
    """Yield what scan_ids should yield, line by line; end with the error, if any."""
    offset = 0
    for line in chunk.split(b'\n')[:-1]:
        try:
            yield decode(line + b'\n').id, offset
        except DamagedRecord as ex:
            yield str(ex)
            return
        offset += len(line) + 1


def scan(chunk):
    """Yield what scan_ids yields; end with the error, if any."""
    try:
        yield from scan_ids(chunk, 0)
    except DamagedRecord as ex:
        yield str(ex)


@pytest.mark.parametrize(('line', 'reason'), INVALID.values(), ids=INVALID)
def test_invalid_line_is_refused(line, reason):
    """A line that breaks the format ends a scan, with the reason."""
    with pytest.raises(DamagedRecord) as caught:
        decode(line)
    assert str(caught.value) == reason
    first = encode(Plant(7, 'Gräser'))
    found = list(scan(first + encode(Plant(8, 'a"b')) + line))
    assert found == [(7, 0), (8, len(first)), reason]


LINES = st.one_of(
    PLANTS.map(encode),
    st.integers().map(b'{"id":%d,"name":"a"}\n'.__mod__),
    st.sampled_from([line for line, _ in VALID.values() if line.endswith(b'\n')]),
    st.sampled_from([encode(Plant(1, text, text)) for text in HOSTILE]),
)


def damaged(plant, place, byte):
    """Return a record with another byte somewhere."""
    line = bytearray(encode(plant))
    line[place % len(line)] = byte
    return bytes(line).rstrip(b'\n') + b'\n'


BROKEN = st.one_of(
    st.sampled_from([line for line, _ in INVALID.values() if line.endswith(b'\n')]),
    st.binary(max_size=40).map(lambda data: data.replace(b'\n', b'') + b'\n'),
    st.builds(damaged, PLANTS, st.integers(0, 500), st.integers(0, 255)),
)


@given(st.lists(LINES, max_size=8), st.lists(BROKEN, max_size=1), st.lists(LINES))
def test_scan_equals_decode(before, broken, after):
    """A scan finds the same ids and errors as decoding line by line."""
    chunk = b''.join([*before, *broken, *after])
    assert list(scan(chunk)) == list(decode_lines(chunk))


def test_scan_decodes_no_usual_line(monkeypatch):
    """A scan finds the ids of our own lines without JSON: it is six times as fast."""
    monkeypatch.delattr(record, 'decode')
    plants = [Plant(0, ''), Plant(-(2**63), 'Gräser', ''), Plant(10, 'Fern', 'shade')]
    assert None not in plants[-1]  # it has every member
    assert [id for id, _ in scan_ids(b''.join(map(encode, plants)), 0)] == [
        plant.id for plant in plants
    ]
