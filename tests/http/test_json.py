"""JSON text and the schema files: what is accepted, what is refused, the messages."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from conftest import Client
from errors import assert_error
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, SchemaError

import schemas
from app import create_app
from schemas import Invalid, NotJSON, Schema, parse
from store import Plant
from store.memory import MemoryStore
from web.errors import ErrorValue

FERN = {'id': 1, 'name': 'Fern', 'tag': 'shade'}


def case_id(value):
    """Return a short readable name of a test case, whatever bytes it has."""
    return ascii(value)[:40] if isinstance(value, (bytes, str)) else ascii(value)[:15]


# ---- JSON text that is accepted, and the value it stands for

ACCEPTED = [
    # literals and white space
    (b'null', None),
    (b'true', True),
    (b'false', False),
    (b' null', None),
    (b'null ', None),
    (b'\tnull\r\n', None),
    (b'\r\n\r\n\t null \t\n\n', None),
    (b'[ ]', []),
    (b'{ }', {}),
    (b'[\n1\t,\r2 ]', [1, 2]),
    (b'{ "a" : 1 ,\n"b"\t:\r2 }', {'a': 1, 'b': 2}),
    (b' ' * 60_000 + b'1', 1),
    # numbers
    (b'0', 0),
    (b'-0', 0),
    (b'1', 1),
    (b'-1', -1),
    (b'10', 10),
    (b'9223372036854775808', 2**63),
    (b'-9223372036854775809', -(2**63) - 1),
    (b'9007199254740993', 2**53 + 1),
    (b'1.0', 1.0),
    (b'-0.0', -0.0),
    (b'0.5', 0.5),
    (b'1.50', 1.5),
    (b'1e3', 1000.0),
    (b'1E3', 1000.0),
    (b'1e+3', 1000.0),
    (b'1e-3', 0.001),
    (b'0e0', 0.0),
    (b'0E+00', 0.0),
    (b'1e03', 1000.0),
    (b'-1.25e-2', -0.0125),
    (b'5e-324', 5e-324),
    (b'1e-999', 0.0),
    (b'1e999', math.inf),
    (b'-1e999', -math.inf),
    (b'0.1000000000000000055511151231257827', 0.1),
    (b'1' * 1000, int('1' * 1000)),
    (b'-' + b'1' * 999, -int('1' * 999)),
    (b'0.' + b'3' * 998, float('0.' + '3' * 998)),
    # strings
    (b'""', ''),
    (b'" "', ' '),
    (b'"a"', 'a'),
    (b'"\\""', '"'),
    (b'"\\\\"', '\\'),
    (b'"\\/"', '/'),
    (b'"/"', '/'),
    (b'"\\b\\f\\n\\r\\t"', '\b\f\n\r\t'),
    (b'"\\u0041"', 'A'),
    (b'"\\u00e9"', '\xe9'),
    (b'"\\u00E9"', '\xe9'),
    (b'"\\u0000"', '\0'),
    (b'"\\u001f"', '\x1f'),
    (b'"\\u2028\\u2029"', '\u2028\u2029'),
    (b'"\\ufeff"', '\ufeff'),
    (b'"\\ufffe\\uffff"', '\ufffe\uffff'),
    (b'"\\ufffd"', '\ufffd'),
    (b'"\\ud7ff\\ue000"', '\ud7ff\ue000'),
    (b'"\\u00e"'.replace(b'e"', b'e9x"'), '\xe9x'),
    (b'"\\\\u0041"', '\\u0041'),
    (b'"\\\\\\u0041"', '\\A'),
    (b'"\x7f"', '\x7f'),
    (b'"\xc2\x80"', '\x80'),
    (b'"\xc3\xa9"', '\xe9'),
    (b'"e\xcc\x81"', 'e\u0301'),
    (b'"\xe2\x82\xac"', '\u20ac'),
    (b'"\xe2\x80\xa8"', '\u2028'),
    (b'"\xef\xbb\xbf"', '\ufeff'),
    (b'"\xef\xbf\xbf"', '\uffff'),
    (b'"\xed\x9f\xbf\xee\x80\x80"', '\ud7ff\ue000'),
    (b'"\xf0\x90\x80\x80"', '\U00010000'),
    (b'"\xf4\x8f\xbf\xbf"', '\U0010ffff'),
    (b'"// no /* comment */ # here"', '// no /* comment */ # here'),
    (b'"NaN, Infinity, [1,]"', 'NaN, Infinity, [1,]'),
    # pairs of surrogates, and what only looks like a surrogate
    (b'"\\ud83d\\ude00"', '\U0001f600'),
    (b'"\\uD83D\\uDE00"', '\U0001f600'),
    (b'"\\ud800\\udc00"', '\U00010000'),
    (b'"\\udbff\\udfff"', '\U0010ffff'),
    (b'"\\ud83d\\ude00\\ud83d\\ude00"', '\U0001f600\U0001f600'),
    (b'{"\\ud83d\\ude00":1}', {'\U0001f600': 1}),
    (b'"\\\\ud800"', '\\ud800'),
    (b'"\\\\\\\\ud800"', '\\\\ud800'),
    (b'"ud800"', 'ud800'),
    # arrays and objects
    (b'[]', []),
    (b'[[]]', [[]]),
    (b'[1,2.0,"3",null,true,{}]', [1, 2.0, '3', None, True, {}]),
    (b'[' + b'1,' * 20_000 + b'1]', [1] * 20_001),
    (b'{}', {}),
    (b'{"":0}', {'': 0}),
    (b'{"a":{"a":{"a":1}}}', {'a': {'a': {'a': 1}}}),
    (b'[{"a":1},{"a":2}]', [{'a': 1}, {'a': 2}]),
    (b'{"a":1,"A":2}', {'a': 1, 'A': 2}),
    (b'{"a":1,"a ":2," a":3}', {'a': 1, 'a ': 2, ' a': 3}),
    (b'{"\xc3\xa9":1,"e\xcc\x81":2}', {'\xe9': 1, 'e\u0301': 2}),
    (b'{"__proto__":1,"constructor":2}', {'__proto__': 1, 'constructor': 2}),
    (b'{"$ref":"#"}', {'$ref': '#'}),
]

# ---- what is refused

REFUSED = [
    # no value, several values, or part of one
    *(b' ', b'\n', b'\t\r\n ', b',', b':', b'[', b']', b'{', b'}', b'"', b"'", b'-'),
    *(b'null null', b'1 2', b'1,2', b'{}{}', b'[][]', b'{},', b'""""', b'1]', b'{}}'),
    *(b'[1', b'[1,', b'["a"', b'["a', b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,'),
    *(b'n', b'nul', b'nulll', b'tru', b'truee', b'fals', b'[nul]', b'{"a":tru}'),
    # what other languages write
    *(b'None', b'True', b'False', b'NULL', b'Null', b'TRUE', b'nil', b'undefined'),
    *(b'NaN', b'-NaN', b'+NaN', b'nan', b'Infinity', b'-Infinity', b'+Infinity'),
    *(b'inf', b'-inf', b'[NaN]', b'[Infinity]', b'{"a":NaN}', b'{"a":-Infinity}'),
    *(b'[1,-Infinity]', b'{"id":NaN}', b'-I', b'1.#INF', b'1#QNAN'),
    *(b"'a'", b"{'a':1}", b'{a:1}', b'{1:1}', b'{null:1}', b'{true:1}', b'`a`'),
    *(b'{"a"=1}', b'{"a"=>1}', b'{"a" 1}', b'{"a","b"}', b'["a":1]', b'("a")', b'a=1'),
    *(b'<plant/>', b'id: 1', b'-1-', b'---', b'x', b'*', b'&', b'!', b'...', b';'),
    *(b'\\n', b'\\u0031', b'\\"a\\"', b'u"a"', b'b"a"', b'"a" + "b"', b'"a" "b"'),
    # commas
    *(b'[,]', b'[1,]', b'[,1]', b'[1,,2]', b'[1 2]', b'[1;2]', b'["a" "b"]'),
    *(b'{,}', b'{"a":1,}', b'{,"a":1}', b'{"a":1,,"b":2}', b'{"a":1 "b":2}'),
    *(b'{"a":,"b":1}', b'{"a"::1}', b'{:1}', b'{"a":1:2}', b'{"a":}'),
    # comments
    *(b'//\n1', b'1 // one', b'/* */1', b'1/* */', b'# one\n1', b'1 # one', b'/**/'),
    *(b'[1, /* two */ 2]', b'{"a":1 // one\n}', b'<!-- -->1', b'-- one\n1'),
    # numbers
    *(b'01', b'00', b'-01', b'-00', b'007', b'01.5', b'+1', b'+0', b'--1', b'- 1'),
    *(b'1.', b'-1.', b'.5', b'-.5', b'.', b'1..2', b'1.2.3', b'1e', b'1e+', b'1e-'),
    *(b'e1', b'1e1.5', b'1ee1', b'1.e1', b'.e1', b'1e 1', b'1 .5', b'0e', b'-e1'),
    *(b'0x10', b'0b1', b'0o7', b'0X1F', b'1_000', b'1,000', b'1 000', b"1'000"),
    *(b'1L', b'1n', b'1f', b'1.0d', b'1j', b'1/2', b'1%', b'$1', b'1a', b'[01]'),
    *('\u0661', '\uff11', '1\u0660', '\u00b2', '\u00bd', '\u2212' + '1', '1\u0301'),
    *(b'1' * 1001, b'-' + b'1' * 1000, b'1' * 60_000, b'[%s]' % (b'9' * 1001)),
    *(b'0.' + b'1' * 1000, b'1e' + b'1' * 1000, b'{"a":%s}' % (b'1' * 5000)),
    # strings
    *(
        b'"a',
        b'a"',
        b'"\\"',
        b'"\\',
        b'"a\\"',
        b'"a"b"',
        b'"\\x41"',
        b'"\\a"',
        b'"\\0"',
    ),
    *(b'"\\\'"', b'"\\ "', b'"\\\n"', b'"\\v"', b'"\\e"', b'"\\U0041"', b'"\\u"'),
    *(b'"\\u1"', b'"\\u12"', b'"\\u123"', b'"\\u123g"', b'"\\u 123"', b'"\\u+123"'),
    *(b'"\\u-123"', b'"\\u0x41"', b'"\\u{41}"', b'"\\u1_23"', b'"\\N{BULLET}"'),
    *(
        '"\\u\uff10\uff10\uff14\uff11"',
        '"\\u\u0660\u0660\u0664\u0661"',
        '\u201ca\u201d',
    ),
    *(b'"%c"' % code for code in range(0x20)),
    *(b'{"%c":1}' % code for code in (0, 9, 10, 13, 31)),
    # what only looks like white space
    *(b'\0', b'1\0', b'\0001', b'\0{}', b'{}\0', b'[\0]', b'\x0b1', b'1\x0c', b'\x1f1'),
    *('\xa01', '1\xa0', '\x851', '\u20281', '1\u2029', '\u30001', '\u200b1', '[\xa0]'),
    *(b'\x1a', b'1\x1a', b'\x7f', b'1\x7f', b'\x1e{}', b'\x1e{}\n'),
    # duplicate member names, at any depth, escaped or not
    *(b'{"a":1,"a":1}', b'{"a":1,"a":2}', b'{"a":1,"b":2,"a":3}', b'{"":1,"":2}'),
    *(b'[{"a":1,"a":2}]', b'{"b":{"a":1,"a":2}}', b'[[[{"b":[{"a":1,"a":2}]}]]]'),
    *(b'{"a":1,"\\u0061":2}', b'{"\\u0061":1,"\\u0061":2}', b'{"/":1,"\\/":2}'),
    *(b'{"\xc3\xa9":1,"\\u00e9":2}', b'{"\\ud83d\\ude00":1,"\xf0\x9f\x98\x80":2}'),
    *(b'{"a":null,"a":null}', b'{"a":{},"a":{}}', b'{"\\u0000":1,"\\u0000":2}'),
    *(b'{"id":1,"id":1,"name":""}', b'{"id":1,"name":"a","name":"b"}'),
    b'{"id":1,"name":"a","soil":{"id":1,"id":2}}',
    b'{%s}' % b','.join([b'"%s":1' % (b'a' * 10_000)] * 2),
    # lone surrogates, in values and in member names
    *(
        b'"\\ud800"',
        b'"\\udbff"',
        b'"\\udc00"',
        b'"\\udfff"',
        b'"\\uD83D"',
        b'"\\uDE00"',
    ),
    *(b'"\\ud83dx"', b'"x\\ude00"', b'"\\ude00\\ud83d"', b'"\\ud83d\\ud83d\\ude00"'),
    *(
        b'"\\ud83d\\u0041"',
        b'"\\ud83d\\n"',
        b'"\\ud83d \\ude00"',
        b'"\\ud83d\\\\ude00"',
    ),
    *(
        b'"\\ud83d\\ude00\\ude00"',
        b'"\\\\\\ud800"',
        b'["\\ud800"]',
        b'[[[["\\udfff"]]]]',
    ),
    *(
        b'{"a":"\\ud800"}',
        b'{"\\ud800":1}',
        b'{"a":{"\\udc00":1}}',
        b'[{"\\udfff":{}}]',
    ),
    *(b'{"\\ud800":1,"\\udc00":2}', b'{"id":1,"name":"","x":"\\ud800"}'),
    *(b'{"\\ud800":1,"\\ud800":2}', b'{"a":{"x\\udfff":1,"x\\udfff":2}}'),
    # bytes that are not UTF-8
    *(
        b'\xff',
        b'\x80',
        b'"\xff"',
        b'"\xfe"',
        b'"\x80"',
        b'"\xbf"',
        b'"\xe9"',
        b'"\xc3"',
    ),
    *(
        b'"\xc0\x80"',
        b'"\xc0\xaf"',
        b'"\xc1\xbf"',
        b'"\xe0\x80\x80"',
        b'"\xe0\x9f\xbf"',
    ),
    *(b'"\xf0\x80\x80\x80"', b'"\xf0\x8f\xbf\xbf"', b'"\xf8\x88\x80\x80\x80"'),
    *(b'"\xfc\x84\x80\x80\x80\x80"', b'"\xf4\x90\x80\x80"', b'"\xf5\x80\x80\x80"'),
    *(b'"\xed\xa0\x80"', b'"\xed\xbf\xbf"', b'"\xed\xa0\xbd\xed\xb8\x80"'),
    *(b'"\xe2\x82"', b'"\xe2\x82', b'"\xf0\x9f\x98"', b'"\xe2\x28\xa1"', b'"\xc3\x28"'),
    *(b'{"\xff":1}', b'[1]\xff', b'\xff[1]', b'{"a":"\x93a\x94"}'),
    # byte order marks and other encodings
    *(b'\xef\xbb\xbf', b'\xef\xbb\xbf1', b'\xef\xbb\xbf{}', b'{}\xef\xbb\xbf'),
    *(b' \xef\xbb\xbf1', b'\xef\xbb\xbf\xef\xbb\xbf1', b'[\xef\xbb\xbf1]'),
    *('{"a":"\xe9"}'.encode(name) for name in ('utf-16', 'utf-16-le', 'utf-16-be')),
    *('{"a":"\xe9"}'.encode(name) for name in ('utf-32', 'utf-32-le', 'utf-32-be')),
    *('{"a":"\xe9"}'.encode(name) for name in ('latin-1', 'cp037')),
    *('{"a":"\u8349"}'.encode(name) for name in ('gbk', 'shift_jis', 'big5')),
    b'\x1f\x8b\x08\x00',
]
REFUSED = [text if isinstance(text, bytes) else text.encode() for text in REFUSED]


@pytest.fixture(scope='module')
def forgetful_client():
    """Return a client of a service whose store takes every plant and keeps none."""

    class Forgetful(MemoryStore):
        def add(self, plant):
            pass

    return Client(create_app(Forgetful(), tokens='token'), 'token')


def test_cases_are_different():
    """No case is listed twice, so that their number means something."""
    texts = [*REFUSED, *(text for text, _ in ACCEPTED)]
    assert len(texts) == len(set(texts))
    assert len(texts) > 400


@pytest.mark.parametrize(('text', 'value'), ACCEPTED, ids=case_id)
def test_text_is_accepted(text, value, forgetful_client):
    """Valid JSON text (RFC 8259) is parsed to one value, of the right types.

    As a body it is no plant, and so 40005, never 40004.
    """
    parsed = parse(text)
    assert parsed == value
    # Equality is not enough: 1 == 1.0 == True, and 0.0 == -0.0.
    assert repr(parsed) == repr(value)
    assert_error(forgetful_client.send(text), 40005)


@pytest.mark.parametrize('text', REFUSED, ids=case_id)
def test_text_is_refused(text, forgetful_client):
    """Invalid JSON text is 40004; its message is short and can be encoded."""
    with pytest.raises(NotJSON) as raised:
        parse(text)
    message = str(raised.value)
    assert message
    assert len(message) < 200
    message.encode()
    assert_error(forgetful_client.send(text), 40004)


def test_empty_text_is_refused():
    """Empty text is no JSON text."""
    with pytest.raises(NotJSON):
        parse(b'')


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        (b'\xff', 'byte 0'),
        (b'["\xc3\xa9\xff"]', 'byte 4'),
        (b'[1 2]', 'character 3'),
        (b'["\xc3\xa9" 2]', 'character 5'),
        (b'{"a":NaN}', 'NaN'),
        (b'-Infinity', '-Infinity'),
        (b'{"name":1,"name":2}', '"name"'),
        (b'"\\ud800"', 'surrogate'),
        (b'1' * 1001, '1000'),
        (b'[' * 60_000, 'deep'),
    ],
    ids=case_id,
)
def test_message_names_the_fault_and_its_place(text, words, forgetful_client):
    """The message says what is wrong and, where that helps, at which place."""
    assert words in assert_error(forgetful_client.send(text), 40004)


@pytest.mark.parametrize('text', [b'"a', b'"\n"', b'"\\x"'], ids=case_id)
def test_message_names_the_place_once(text, forgetful_client):
    """The message names the place once, in a correct sentence."""
    assert ' at at ' not in assert_error(forgetful_client.send(text), 40004)


# ---- depth

SHAPES = {
    'arrays': lambda depth: b'[' * depth + b']' * depth,
    'objects': lambda depth: b'{"a":' * depth + b'1' + b'}' * depth,
    'both': lambda depth: b'[{"a":' * (depth // 2) + b'1' + b'}]' * (depth // 2),
    'surrogates': lambda depth: b'[' * depth + b'"\\ud83d\\ude00"' + b']' * depth,
}


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('depth', [2, 32, 62])
def test_64_levels_are_accepted(depth, shape, forgetful_client):
    """64 levels, of which the plant is one, are read, whatever they are made of."""
    body = b'{"id":1,"name":"Fern","x":%s}' % SHAPES[shape](depth)
    assert forgetful_client.send(body).status_int == 200


@pytest.mark.parametrize('shape', SHAPES)
def test_100_000_levels_are_refused(shape, serve, store):
    """100,000 levels are refused, closed or left open, and the service goes on."""
    client = serve(store, max_body_bytes=2_000_000)
    for text in (SHAPES[shape](100_000), SHAPES[shape](100_000)[:300_000]):
        with pytest.raises(NotJSON):
            parse(text)
        assert_error(client.send(text), 40004)
    assert client.add(FERN).status_int == 200


@pytest.mark.parametrize(
    'body',
    ['%s', '{"id":1,"name":%s}', '{"id":%s}', '{"id":1,"name":"","x":%s}'],
)
@pytest.mark.parametrize('shape', ['arrays', 'objects'])
def test_depth_has_one_bound(shape, body, forgetful_client):
    """Text up to some depth is read, and all deeper text is refused."""
    before, beyond = {200, 40005}, {40004}
    answered = []
    for depth in (*range(64, 800, 32), *range(800, 1_050, 5)):
        text = body.encode() % SHAPES[shape](depth)
        response = forgetful_client.send(text)
        answered.append(response.json.get('error', 200))
    assert set(answered) <= before | beyond
    assert answered == sorted(answered, key=beyond.__contains__)


# ---- messages about a NewPlant


@pytest.mark.parametrize(
    ('value', 'faults'),
    [
        (FERN, []),
        ({'id': 1, 'name': ''}, []),
        ({'id': 1.5, 'name': 'Fern'}, ['id: 1.5 is not an integer']),
        ({'id': 1.0, 'name': 'Fern'}, ['id: 1.0 is not an integer']),
        ({'id': True, 'name': 'Fern'}, ['id: true is not an integer']),
        ({'id': '1', 'name': 'Fern'}, ['id: "1" is not an integer']),
        ({'id': None, 'name': 'Fern'}, ['id: null is not an integer']),
        (
            {'id': 2**63, 'name': ''},
            [f'id: {2**63} is greater than {2**63 - 1}'],
        ),
        (
            {'id': -(2**63) - 1, 'name': ''},
            [f'id: {-(2**63) - 1} is less than {-(2**63)}'],
        ),
        ({'id': 1}, ['name: is missing']),
        ({'name': 'Fern'}, ['id: is missing']),
        ({}, ['id: is missing', 'name: is missing']),
        ({'id': 1, 'name': 5}, ['name: 5 is not a string']),
        ({'id': 1, 'name': 'é', 'tag': ['é']}, ['tag: ["é"] is not a string']),
        (
            {'id': '1', 'name': 1, 'tag': 1},
            [
                'id: "1" is not an integer',
                'name: 1 is not a string',
                'tag: 1 is not a string',
            ],
        ),
        ([], ['body: [] is not an object']),
        (None, ['body: null is not an object']),
    ],
    ids=str,
)
def test_faults_name_member_and_rule(value, faults):
    """Each fault names its member and the rule, and is listed once."""
    assert sorted(Schema('NewPlant').faults(value)) == faults


def test_fault_of_a_pattern_is_escaped():
    """Text that a pattern forbids is shown escaped, with the pattern."""
    (fault,) = Schema('NewPlant').faults({'id': 1, 'name': 'a\0b'})
    # The pattern as it is in the file, where a backslash is written twice.
    assert fault == r'name: "a\u0000b" does not match "^[^\\u0000]*$"'


@pytest.mark.parametrize(
    'body',
    [
        {'id': 'x' * 50_000, 'name': ''},
        {'id': ['x' * 50_000], 'name': ''},
        {'id': 1, 'name': '\0' * 10_000},
        {'id': 1, 'name': {'x' * 50_000: 1}},
        {'id': int('9' * 1000), 'name': ''},
        [{}] * 10_000,
        'x' * 50_000,
    ],
    ids=case_id,
)
def test_long_input_is_cut_in_the_message(body, forgetful_client):
    """A message shows the beginning of long input and says that it is cut."""
    message = assert_error(forgetful_client.add(body), 40005)
    assert len(message) < 300
    assert '...' in message


def test_long_duplicate_name_is_cut_in_the_message(forgetful_client):
    """A duplicate member name is cut, too."""
    name = b'"%s":1' % (b'a' * 30_000)
    message = assert_error(forgetful_client.send(b'{%s,%s}' % (name, name)), 40004)
    assert len(message) < 300


def test_faults_can_be_encoded():
    """Every fault is text that UTF-8 can encode, whatever the input was."""
    for text in ('\U0010ffff', '\u2028', '\x7f', '\ufffe', '"', '\\'):
        for fault in Schema('NewPlant').faults({'id': text, 'name': [text]}):
            fault.encode()


# ---- names that are answered as they were sent

NAMES = [
    *(chr(plane << 16 | 0x1234) for plane in range(17)),  # one of every plane
    *(chr(plane << 16 | 0xFFFE) for plane in range(17)),  # its noncharacters
    '\U0010ffff',
    '\ufdd0\ufdef',
    *(chr(code) for code in range(1, 0x20)),
    *('\x7f', '\x80', '\x85', '\x9f', '\xa0', '\xad', '\u061c', '\u180e', '\u200b'),
    *('\u200e', '\u200f', '\u2028', '\u2029', '\u202e', '\u2060', '\u2066', '\u3000'),
    *('\ufeff', '\ufeffFern', 'Fern\ufeff', '\ufff9', '\ufffc', '\ufffd', '\U000e0001'),
    *(
        '"',
        '\\',
        '\\\\',
        '\\"',
        '/',
        '\\u0041',
        '\\ud800',
        '\\0',
        "'",
        '`',
        '""',
        '\\n',
    ),
    *(
        '{',
        '}',
        '[]',
        '{"id":2}',
        '","tag":"',
        '"}\n{"id":2,"name":"',
        'null',
        '#',
        '%s',
    ),
    *(
        '%00',
        '&amp;',
        '<script>',
        '</script>',
        '${x}',
        '{0}',
        '../../etc',
        "'; --",
        '\\x00',
    ),
    *('=1+1', '@x', '-1', '0', '1e999', 'NaN', 'true', ' ', '  ', ' a', 'a ', '\ta\n'),
    *('\r\n', '\n\r', 'a\nb', 'a\r\nSet-Cookie: x', '\x1b[31m', '\b\b'),
    'Å',
    'A\u030a',  # looks the same, but is another name
    '\u212b',
    'e' + '\u0301' * 1000,
    '\u0301',  # a combining mark with nothing to combine with
    'ﬁ',
    'ß',
    'İı',
    'שרך',
    'سرخس',
    'a\u202eb\u202cc',
    '蕨',
    'シダ',
    '고사리',
    'फ़र्न',
    '\U0001f469\u200d\U0001f33e',  # joined: a farmer
    '\U0001f1e9\U0001f1ea',  # a flag
    '\U0001f44d\U0001f3fd',
    '\u2764\ufe0f',
    'Z\u0351\u036b\u0343',
    'x' * 10_000,
    '\U0001f33f' * 2_000,
    '\x01' * 5_000,
]


def test_names_are_different():
    """No name is listed twice, so that each one tests something."""
    assert len(NAMES) == len(set(NAMES))
    assert len(NAMES) > 150


@pytest.mark.parametrize('text', NAMES, ids=case_id)
def test_name_is_answered_and_stored_as_it_was_sent(text, client, store):
    """A name and a tag are answered and stored character by character."""
    for id, escaped in enumerate((True, False)):
        body = json.dumps({'id': id, 'name': text, 'tag': text}, ensure_ascii=escaped)
        response = client.send(body.encode())
        assert response.status_int == 200, response.text
        assert json.loads(response.body) == {'name': text, 'tag': text}
    assert list(store) == [Plant(0, text, text), Plant(1, text, text)]


@pytest.mark.parametrize(
    'text', ['Fern', '\xc5', 'A\u030a', 'שרך', '\t', ''], ids=ascii
)
def test_similar_names_differ(text, client):
    """Names are compared exactly: no normalization, no case folding, no trimming."""
    for _ in range(2):
        assert client.add({'id': 1, 'name': text}).status_int == 200
    for other in (f'{text} ', f'{text}\u200b', f'\ufeff{text}', 'fern', '\u212b'):
        assert_error(client.add({'id': 1, 'name': other}), 40006)


# ---- an operator edits a schema


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Return a function that changes a member's rule in a copy of the schemas."""
    directory = tmp_path / 'schemas'
    shutil.copytree(schemas.DIRECTORY, directory)
    monkeypatch.setattr(schemas, 'DIRECTORY', directory)

    def edit(name, change):
        path = Path(directory, f'{name}.json')
        schema = json.loads(path.read_bytes())
        change(schema)
        path.write_text(json.dumps(schema))

    return edit


@pytest.mark.parametrize('name', ['Plant', 'NewPlant'])
def test_operator_bounds_a_name(name, edit, serve, store):
    """A ``maxLength`` in either file holds from the next start on."""

    def bound(schema):
        schema['properties'].setdefault('name', {})['maxLength'] = 4

    edit(name, bound)
    client = serve(store)
    assert client.add(FERN).status_int == 200
    message = assert_error(client.add({'id': 2, 'name': 'Ferns'}), 40005)
    assert message.startswith('name: ')
    assert list(store) == [Plant(**FERN)]


def test_operator_requires_a_tag(edit, serve, store):
    """A member that the operator requires is reported as missing."""
    edit('Plant', lambda schema: schema['required'].append('tag'))
    message = assert_error(serve(store).add({'id': 1, 'name': 'Fern'}), 40005)
    assert message == 'tag: is missing'


def test_operator_narrows_the_ids(edit, serve, store):
    """An edited range is checked, and the message names it."""
    edit('NewPlant', lambda schema: schema['properties']['id'].update(minimum=1))
    client = serve(store)
    message = assert_error(client.add({'id': 0, 'name': 'Fern'}), 40005)
    assert message == 'id: 0 is less than 1'
    assert client.add(FERN).status_int == 200


def test_operator_adds_a_nested_member(edit, serve, store):
    """A fault inside a member that the operator added is named by its path."""
    pot = {'type': 'object', 'properties': {'size': {'type': 'integer'}}}
    edit('Plant', lambda schema: schema['properties'].update(pots={'items': pot}))
    body = {**FERN, 'pots': [{'size': 1}, {'size': 'big'}]}
    message = assert_error(serve(store).add(body), 40005)
    assert message == 'pots.1.size: "big" is not an integer'


@pytest.mark.parametrize(
    'name',
    ['Plant', 'NewPlant'],
)
@pytest.mark.parametrize('literal', [b'1.0', b'1e0'])
def test_integer_is_a_literal_in_every_file(literal, name, edit, serve, store):
    """A number with a fraction or an exponent is no integer, in either file."""
    edit(name, lambda schema: schema['properties'].update(size={'type': 'integer'}))
    body = b'{"id": 1, "name": "Fern", "size": %s}'
    message = assert_error(serve(store).send(body % literal), 40005)
    assert message == 'size: 1.0 is not an integer'


@pytest.mark.parametrize('literal', [b'1e999', b'1' * 400], ids=['1e999', '400 digits'])
def test_number_that_no_float_can_hold_is_40005(literal, edit, serve, store):
    """``multipleOf`` refuses a number that no float can hold: 40005, not 500."""
    rule = {'multipleOf': 0.5, 'maximum': 5}
    edit('Plant', lambda schema: schema['properties'].update(size=rule))
    body = b'{"id": 1, "name": "Fern", "size": %s}'
    assert_error(serve(store).send(body % literal), 40005)


@pytest.mark.parametrize(
    ('rule', 'named'),
    [
        ({'maxLength': 70}, '70'),
        ({'enum': ['Fern']}, 'Fern'),
        ({'const': 'Fern'}, 'Fern'),
    ],
    ids=str,
)
def test_operators_rule_is_named_beside_long_input(rule, named, edit, serve, store):
    """However long the input is, the message names the rule that it breaks."""
    edit('Plant', lambda schema: schema['properties']['name'].update(rule))
    message = assert_error(serve(store).add({'id': 1, 'name': 'x' * 1_000}), 40005)
    assert len(message) < 300
    assert named in message.replace('x' * 60, '')


@pytest.mark.parametrize('name', ['Plant', 'NewPlant'])
@pytest.mark.parametrize(
    'change',
    [
        {'type': 'strin'},
        {'maxLength': -1},
        {'maxLength': '4'},
        {'pattern': '('},
        {'pattern': r'^\p{L}*$'},
        {'$ref': 'Plont.json'},
    ],
    ids=str,
)
def test_broken_schema_stops_the_start(change, name, edit, serve, store):
    """An invalid schema is found at the start, not at the first plant."""
    edit(name, lambda schema: schema['properties'].update(name=change))
    with pytest.raises((ValueError, SchemaError, re.error)):
        serve(store)


@pytest.mark.parametrize(
    'reference',
    [
        'Plont.json',
        'Plant.json#/$defs/name',
        'Plant.json#name',
        '#/properties/nome',
        'https://example.org/name.json',
        'https://json-schema.org/draft/2020-12/schema',
        {'$id': 'pots/Pot.json', '$ref': 'Plant.json'},
        {'items': {'not': {'$ref': 'Plont.json'}}},
        {'$dynamicRef': '#name'},
    ],
    ids=str,
)
def test_reference_that_leads_nowhere_is_refused(reference, edit):
    """A reference to nothing is an error that names its file, at any depth."""
    if isinstance(reference, str):
        reference = {'$ref': reference}
    edit('NewPlant', lambda schema: schema['properties'].update(pot=reference))
    with pytest.raises(ValueError, match=r'NewPlant\.json: .* leads nowhere'):
        schemas.load()


@pytest.mark.parametrize(
    'reference',
    ['Plant.json', '#', 'Plant.json#/properties/name', '#pot', 'pots/Pot.json'],
)
def test_valid_reference_is_accepted(reference, edit, serve, store):
    """A reference may be to a file, a place in it, an anchor or an embedded schema."""
    pot = {'$id': 'pots/Pot.json', 'items': {'$ref': '../Plant.json'}}
    members = {'pot': {'$ref': reference}, 'pots': pot, 'size': {'$anchor': 'pot'}}
    edit('NewPlant', lambda schema: schema['properties'].update(members))
    assert serve(store).add(FERN).status_int == 200


def test_schema_that_is_no_object_is_refused(edit):
    """A schema file that is just true or false is refused."""
    Path(schemas.DIRECTORY, 'Plant.json').write_text('true')
    with pytest.raises(ValueError, match=r'Plant\.json: true is not an object'):
        schemas.load()


def test_schema_that_is_no_json_stops_the_start(edit, serve, store):
    """A schema file that is no JSON is found at the start."""
    Path(schemas.DIRECTORY, 'NewPlant.json').write_text('{')
    with pytest.raises(ValueError, match='line 1'):
        serve(store)


# ---- properties

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
# So near to a plant that valid and invalid values are generated.
NEAR_PLANTS = st.fixed_dictionaries(
    {},
    optional={
        'id': st.integers(-(2**63), 2**63 - 1) | st.integers() | VALUES,
        'name': st.text() | VALUES,
        'tag': st.text() | VALUES,
        'x': VALUES,
    },
)
MANY_EXAMPLES = settings(max_examples=60, deadline=None, database=None)


def is_new_plant(value):
    """Whether a value is a NewPlant, as the specification says it."""

    def is_text(text):
        return isinstance(text, str) and '\0' not in text

    return (
        isinstance(value, dict)
        and type(value.get('id')) is int
        and -(2**63) <= value['id'] < 2**63
        and is_text(value.get('name'))
        and is_text(value.get('tag', ''))
    )


@MANY_EXAMPLES
@given(value=VALUES | NEAR_PLANTS, escaped=st.booleans())
def test_only_new_plants_are_accepted(forgetful_client, value, escaped):
    """Every JSON value that is a NewPlant is 200, every other one 40005."""
    response = forgetful_client.send(json.dumps(value, ensure_ascii=escaped).encode())
    if is_new_plant(value):
        assert response.status_int == 200, response.text
        expected = {
            member: value[member] for member in ('name', 'tag') if member in value
        }
        assert response.json == expected
    else:
        assert_error(response, 40005)


RULES = [
    {},
    {'maxLength': 2},
    {'minLength': 2},
    {'pattern': '^[a-z]*$'},
    {'pattern': '^.$'},
    {'pattern': '^[^0]'},
    {'pattern': r'^\W*$'},
    {'pattern': r'^\D*$'},
    {'pattern': r'^\S*$'},
    {'enum': ['', '0', 'Fern']},
    {'const': '0'},
    {'not': {'const': ''}},
    {'anyOf': [{'maxLength': 1}, {'minLength': 3}]},
]


@pytest.mark.parametrize('rule', RULES, ids=str)
def test_compiled_schema_agrees_with_jsonschema(rule, edit):
    """What is accepted is what jsonschema accepts, also with an operator's rules."""
    edit('Plant', lambda schema: schema['properties']['name'].update(rule))
    schema = Schema('NewPlant')

    @settings(MANY_EXAMPLES, max_examples=10)
    # Dialects of patterns differ in which of these are letters, digits or blanks.
    @example(value={'id': 1, 'name': '\xe9'})
    @example(value={'id': 1, 'name': '\u0661'})
    @example(value={'id': 1, 'name': '\x1c'})
    @example(value={'id': 1, 'name': '\ufeff'})
    @given(value=VALUES | NEAR_PLANTS)
    def check(value):
        try:
            schema.read(json.dumps(value).encode())
            faults = ''
        except Invalid as ex:
            faults = str(ex)
        assert faults == '; '.join(schema.faults(value))

    check()


# Where in a rule a pattern may be, and the value whose validity tells if it matches.
PATTERN_RULES = {
    'pattern': (lambda pattern: {'pattern': pattern}, lambda text: text),
    'names': (
        lambda pattern: {'propertyNames': {'pattern': pattern}},
        lambda text: {text: 1},
    ),
    'members': (
        lambda pattern: {'patternProperties': {pattern: False}},
        lambda text: {text: 1},
    ),
}
PATTERNS = [
    *(r'^[^\u0000]*$', r'^[^\u0000]+$', '^.$', '^[a-z]*$', '', '^$'),
    *(r'^\w*$', r'^\W*$', r'^\d+$', r'^\D*$', r'^\s+$', r'^\S*$', r'\bFern\b'),
    *('(?i)^fern$', r'^(.)\1$', '^(?!Fern)', r'^\u00e9$', r'^[\d\s]*\Z'),
]
# Dialects differ in letters, digits, blanks, line ends and pairs of surrogates.
DISPUTED = [
    *('', '\0', 'a\0', '\n', 'a\n', '\r', '\u2028', '\x85', '\x1c', '\xa0', '\ufeff'),
    *('\u180e', '\xe9', '\xe9Fern', '\u0661', '\xb2', '\u212a', '\u017f', '\U0001f600'),
    *('e\u0301', 'Fern', 'FERN', 'Fern\n', 'aa', '\n\n', '1', '_', '\U0001d7d8'),
]


@pytest.mark.parametrize('form', PATTERN_RULES)
@pytest.mark.parametrize('pattern', PATTERNS)
def test_patterns_match_as_in_jsonschema(pattern, form, edit):
    """A pattern matches the same texts as in jsonschema, wherever it is in a rule."""
    rule_of, value_of = PATTERN_RULES[form]
    rule = rule_of(pattern)
    edit('Plant', lambda schema: schema['properties'].update(soil=rule))
    schema = Schema('NewPlant')
    reference = Draft202012Validator(rule)

    def check(text):
        soil = value_of(text)
        try:
            schema.read(json.dumps({**FERN, 'soil': soil}).encode())
            accepted = True
        except Invalid:
            accepted = False
        assert accepted == reference.is_valid(soil)

    for text in DISPUTED:
        check(text)
    settings(MANY_EXAMPLES, max_examples=5)(given(st.text())(check))()


def test_valid_plant_does_not_need_jsonschema(monkeypatch):
    """The compiled validator accepts plants without a call of jsonschema."""
    asked = []
    monkeypatch.setattr(Schema, 'faults', lambda self, value: asked.append(value))
    assert Schema('NewPlant').read(json.dumps(FERN).encode()) == FERN
    assert asked == []


@MANY_EXAMPLES
@given(value=VALUES, escaped=st.booleans(), indent=st.sampled_from([None, '\t']))
def test_parse_undoes_dumps(value, escaped, indent):
    """Every JSON value is parsed to what was written."""
    text = json.dumps(value, ensure_ascii=escaped, indent=indent).encode()
    assert repr(parse(text)) == repr(value)


def spoil(text, place, junk):
    """Return text with one of its bytes replaced."""
    place %= len(text)
    return text[:place] + junk + text[place + 1 :]


SPOILED = st.builds(
    spoil,
    NEAR_PLANTS.map(json.dumps).map(str.encode),
    st.integers(0, 10_000),
    st.binary(max_size=3) | st.sampled_from([b'"', b'\\u', b'\\ud800', b',', b'NaN']),
)


@MANY_EXAMPLES
@given(body=st.binary(min_size=1) | SPOILED)
def test_any_bytes_are_a_plant_or_an_error_of_the_body(forgetful_client, body):
    """Whatever the body is, the answer is a plant, 40004 or 40005."""
    response = forgetful_client.send(body)
    if response.status_int != 200:
        value = response.json['error']
        assert value in (ErrorValue.NOT_JSON, ErrorValue.NOT_A_NEW_PLANT)
        assert_error(response, value)
