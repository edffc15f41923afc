"""JSON text and the schema files: what is accepted, what is refused, the messages."""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import Client
from exchange import assert_error
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator, Draft202012Validator
from jsonschema.validators import extend

import schemas
from app import create_app
from schemas import Invalid, Schema
from store import Plant
from web.errors import ErrorValue

FERN = {'id': 1, 'name': 'Fern', 'tag': 'shade'}
LARGEST = sys.float_info.max


def case_id(value):
    """Return a short readable name of a test case, whatever bytes it has."""
    return ascii(value)[:40] if isinstance(value, (bytes, str)) else ascii(value)[:15]


# JSON text, and the value that it stands for.
ACCEPTED = {
    b'\r\n\r\n\t false \t\n\n': False,
    b' ' * 60_000 + b'1': 1,
    # numbers
    b'-9223372036854775809': -(2**63) - 1,
    b'-0': 0,
    b'1.0': 1.0,
    b'-1.25e-02': -0.0125,
    b'1e-999': 0.0,
    b'1e999': LARGEST,
    b'-1e999': -LARGEST,
    b'1' * 1000: int('1' * 1000),
    b'0.' + b'3' * 998: float('0.' + '3' * 998),
    # strings
    b'"\\u00e9\\u00E9\xc3\xa9"': '\xe9\xe9\xe9',
    b'"\\u0000\\u2028\\ufeff\\uffff"': '\0\u2028\ufeff\uffff',
    b'"\xef\xbb\xbf\xef\xbf\xbf"': '\ufeff\uffff',
    b'"// no /* comment */, NaN"': '// no /* comment */, NaN',
    # pairs of surrogates, and what only looks like a surrogate
    b'"\\ud83d\\ude00\\uD83D\\uDE00"': '\U0001f600\U0001f600',
    b'{"\\ud800\\udc00":1}': {'\U00010000': 1},
    b'"\\\\ud800 ud800"': '\\ud800 ud800',
    # arrays and objects
    b'[1,2.0,"3",null,true,{}]': [1, 2.0, '3', None, True, {}],
    b'[{"a":1},{"a":2}]': [{'a': 1}, {'a': 2}],
    b'{"a":1,"A":2,"a ":3}': {'a': 1, 'A': 2, 'a ': 3},
}

# Words without white space, by what is wrong with them.
REFUSED_WORDS = {
    'syntax': '] ["a {"a": 1,2 {}{} True \'a\' {a:1} [1,] {"a":1,} /**/1 01 .5 \uff11',
    'no numbers': 'NaN -NaN Infinity -Infinity [NaN] {"a":-Infinity}',
    'escapes': r'"\x41" "\u123g"',
    'a name twice': '{"a":1,"a":1} [[{"b":[{"a":1,"a":2}]}]] {"a":1,"\\u0061":2} '
    r'{"\ud800":1,"\ud800":2}',
    'lone surrogates': r'"\ud800" "\uDFFF" "x\ude00" "\ude00\ud83d" "\ud83d\\ude00" '
    r'"\\\ud800" [["\udfff"]] {"\ud800":1} {"id":1,"name":"","x":"\ud800"}',
}
REFUSED_BYTES = {
    'control characters': [b'"\0"', b'"\n"', b'"\x1f"'],
    'looks like white space': [b'1\0', b'\x0b1', '\xa01'.encode()],
    'long numbers': [b'1' * 1001, b'0.' + b'1' * 1000, b'{"a":%s}' % (b'1' * 5000)],
    'long name twice': [b'{%s}' % b','.join([b'"%s":1' % (b'a' * 10_000)] * 2)],
    'not UTF-8': [b'\xff', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xe2\x82'],
    'byte order marks': [b'\xef\xbb\xbf', b'\xef\xbb\xbf{}', b'{}\xef\xbb\xbf'],
    'other encodings': [
        '{"a":"\xe9"}'.encode(name) for name in ('utf-16', 'utf-32-be', 'latin-1')
    ],
}
# What the message says of some: the fault and, where that helps, its place.
REFUSED_WITH = {
    b'["\xc3\xa9\xff"]': 'byte 4',
    b'["\xc3\xa9" 2]': 'character 5',
    b'"a': 'Unterminated string starting at character 0',
    b'{"a":NaN}': 'NaN',
    b'{"name":1,"name":2}': '"name"',
    b'{"id":1,"name":2,"name":2}': 'the member "name" is there more than once',
    b'"\\ud800"': 'surrogate',
    b'1' * 1001: '1000',
    b'[' * 60_000: 'deep',
    b'\xef\xbb\xbf{}': 'byte order mark',
}
REFUSED = {
    **{word.encode(): '' for line in REFUSED_WORDS.values() for word in line.split()},
    **{text: '' for texts in REFUSED_BYTES.values() for text in texts},
    **REFUSED_WITH,
}


@pytest.fixture(scope='module')
def forgetful_client():
    """Return a client of a service whose store takes every plant and keeps none."""
    return Client(create_app(Mock(), tokens='token'), 'token')


@pytest.mark.parametrize(('text', 'value'), ACCEPTED.items(), ids=case_id)
def test_text_is_accepted(text, value, edit_schema, forgetful_client):
    """Valid JSON text is parsed to one value; as a body it is 40005, never 40004."""
    # Equality is not enough: 1 == 1.0 == True, and 0.0 == -0.0.
    edit_schema('Anything', dict.copy)
    assert repr(Schema('Anything', schemas.load()).read(text)) == repr(value)
    assert_error(forgetful_client.send(text), 40005)


@pytest.mark.parametrize(('text', 'words'), REFUSED.items(), ids=case_id)
def test_text_is_refused(text, words, forgetful_client):
    """Invalid JSON text is 40004 with a short message."""
    message = assert_error(forgetful_client.send(text), 40004)
    assert words in message
    assert len(message) < 200


SHAPES = {
    'arrays': lambda depth: b'[' * depth + b']' * depth,
    'objects': lambda depth: b'{"a":' * depth + b'1' + b'}' * depth,
    'surrogates': lambda depth: b'[' * depth + b'"\\ud83d\\ude00"' + b']' * depth,
}


@pytest.mark.parametrize('stack', [1_000, 1_000_000])
@pytest.mark.parametrize('shape', SHAPES)
def test_200_levels_are_read_and_more_refused(shape, stack, serve, store):
    """200 levels, of which the plant is one, are read, whatever the stack permits."""
    client = serve(store, max_body_bytes=2_000_000)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(stack)
    try:
        for text in (SHAPES[shape](100_000), SHAPES[shape](100_000)[:300_000]):
            assert 'deep' in assert_error(client.send(text), 40004)
        body = b'{"id":1,"name":"Fern","x":%s}'
        assert 'deep' in assert_error(client.send(body % SHAPES[shape](200)), 40004)
        assert client.send(body % SHAPES[shape](199)).status_int == 200
        body = body.replace(b'"x"', b'"tag"')
        assert_error(client.send(body % SHAPES[shape](199)), 40005)
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize('text', ['[' * 300, '\\"' + '{"' * 300, '[]' * 300])
def test_brackets_in_strings_are_no_levels(text, client):
    """Only arrays and objects count: 300 brackets in strings, or side by side, pass."""
    plant = {'id': 1, 'name': text, 'x': [[]] * 300, text: {'a': text}}
    assert client.add(plant).json == {'name': text}
    assert_error(client.send(json.dumps(plant).encode()[:-1]), 40004)


TOO_LARGE = f'is greater than the maximum of {2**63 - 1}'
# An id, how it is shown, and the rule that it breaks.
IDS = [
    *[(text, text, 'is not an integer') for text in ('1.0', 'true', 'null')],
    ('1e3', '1000.0', 'is not an integer'),
    (-(2**63) - 1, -(2**63) - 1, f'is less than the minimum of {-(2**63)}'),
    (2**63, 2**63, TOO_LARGE),
    ('1' * 1000, f'{"1" * 60}...', TOO_LARGE),
]
FAULTS = {
    **{f'{{"id":{id},"name":""}}': [f'id: {shown} {rule}'] for id, shown, rule in IDS},
    '{"id":1e999,"name":""}': [
        f'id: {LARGEST} {rule}' for rule in (TOO_LARGE, 'is not an integer')
    ],
    '{}': ['id: is missing', 'name: is missing'],
    '{"id":"1","name":null,"tag":["é"]}': [
        'id: "1" is not an integer',
        *('name: null is not a string', 'tag: ["é"] is not a string'),
    ],
    r'{"id":1,"name":"a\u0000b","tag":"\u0000"}': [  # SQL text cannot hold U+0000
        r'name: "a\u0000b" does not match "^[^\u0000]*$"',
        r'tag: "\u0000" does not match "^[^\u0000]*$"',
    ],
    '[]': ['body: [] is not an object'],
    f'{{"id":1,"name":{"1" * 999}}}': [f'name: {"1" * 60}... is not a string'],
}


@pytest.mark.parametrize(('body', 'faults'), FAULTS.items(), ids=case_id)
def test_message_lists_every_fault_with_member_and_rule(body, faults, forgetful_client):
    """Each fault names its member and the rule, and is listed once."""
    message = assert_error(forgetful_client.send(body.encode()), 40005)
    assert sorted(message.split('; ')) == faults


def test_plant_is_answered_and_stored_as_it_was_sent(client, store):
    """Nothing is rounded, trimmed, folded, normalized or taken for an escape."""
    names = ['', 'x' * 30_000, 'a\r\nSet-Cookie: x', '\x1b[31m\x7f\x85\u2028', ' a ']
    names += ['\ufeffFERN\uffff', 'A\u030a', '\xc5', '"\\u0041\\ud800\\0', '%00{0}</p>']
    ids = [-(2**63), 2**63 - 1, 2**53 + 1, *range(len(names) - 3)]
    plants = [Plant(id, name, name) for id, name in zip(ids, names, strict=True)]
    for plant in plants:
        answer = client.add({'id': plant.id, 'name': plant.name, 'tag': plant.tag})
        assert answer.json == {'name': plant.name, 'tag': plant.tag}
    assert list(store) == plants


POTS = {'items': {'required': ['size'], 'properties': {'size': {'type': 'integer'}}}}
BROKEN_POTS = 'pots.1.size: "big" is not an integer; pots.2.size: is missing'
CLOSED = {'unevaluatedProperties': False}
SIZES = {'anyOf': [{'type': 'string'}, {'maximum': 1}]}
LONG, CUT = int('1' * 99), f'size: {"1" * 60}... '
# The file that an operator edits, a member and its rule, a value that breaks that, and
# the sentence with the broken rule and the beginning of a long value.
EDITS = [
    ('Plant', 'name', {'maxLength': 4}, 'Ferns', 'name: "Ferns" is longer than 4 char'),
    ('NewPlant', 'name', {'maxLength': 4}, 'Ferns', 'name: "Ferns" is longer than 4 '),
    ('Plant', 'pots', POTS, [{'size': 1}, {'size': 'big'}, {}], BROKEN_POTS),
    ('Plant', 'size', {'multipleOf': 2}, LONG, f'{CUT}is not a multiple of 2'),
    ('Plant', 'size', SIZES, LONG, f'{CUT}is not valid under any'),
    ('Plant', 'size', CLOSED, {'x' * 999: 1}, 'size: Unevaluated properties are'),
]


@pytest.mark.parametrize(('file', 'member', 'rule', 'value', 'sentence'), EDITS)
def test_rule_of_an_operator_holds_and_is_named(
    file, member, rule, value, sentence, edit_schema, serve, store
):
    """An edit of either file holds from the next start on, also in nested members."""

    def change(schema):
        schema['properties'].setdefault(member, {}).update(rule)

    edit_schema(file, change)
    client = serve(store)
    assert client.add(FERN).status_int == 200
    message = assert_error(client.add({**FERN, 'id': 2, member: value}), 40005)
    assert message.startswith(sentence)
    assert len(message) < 300
    assert list(store) == [Plant(**FERN)]


@pytest.mark.parametrize('rule', [{'uniqueItems': True}, {'const': [1]}], ids=str)
def test_rule_that_compares_values_has_a_bound(rule, edit_schema, serve, store):
    """200 levels are read where a rule compares values, too."""
    edit_schema('Plant', lambda schema: schema['properties'].update(soil=rule))
    client = serve(store)
    soil = b'[%s,1]' % SHAPES['arrays'](197)
    answer = client.send(b'{"id":1,"name":"Fern","soil":[%s,%s]}' % (soil, soil))
    assert_error(answer, 40005)


@pytest.mark.parametrize(
    'change',
    [
        *[{'type': 'strin'}, {'maxLength': -1}, {'pattern': '('}],
        *[{'$ref': 'Plont.json'}, {'$ref': 'https://example.org/name.json'}],
        *[{'items': {'not': {'$ref': '#/properties/nome'}}}, {'$ref': 'http://[#a'}],
        *['true', '{'],
    ],
    ids=str,
)
def test_broken_schema_stops_the_start(change, edit_schema, serve, store):
    """An invalid schema is found at the start; the message is one sentence."""
    if isinstance(change, str):
        Path(schemas.DIRECTORY, 'Plant.json').write_text(change)
    else:
        edit_schema('Plant', lambda schema: schema['properties'].update(size=change))
    with pytest.raises(ValueError, match=r'Plant\.json: .') as raised:
        serve(store)
    assert '\n' not in str(raised.value)


def test_valid_reference_is_accepted(edit_schema, serve, store):
    """A reference may be to a file, a place in it, an anchor or an embedded schema."""
    pot = {'$id': 'pots/Pot.json', 'items': {'$ref': '../Plant.json'}}
    members = {'pots': pot, 'size': {'$anchor': 'pot'}}
    for place in 'Plant.json', '#', 'Plant.json#/properties/name', '#pot', pot['$id']:
        members[place] = {'$ref': place}
    edit_schema('NewPlant', lambda schema: schema['properties'].update(members))
    assert serve(store).add(FERN).status_int == 200


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


def is_new_plant(value):
    """Whether a value is a NewPlant, as the specification says it."""
    if not isinstance(value, dict) or type(value.get('id')) is not int:
        return False
    texts = value.get('name'), value.get('tag', '')
    are_texts = all(isinstance(text, str) and '\0' not in text for text in texts)
    return are_texts and -(2**63) <= value['id'] < 2**63


@given(value=VALUES | NEAR_PLANTS, escaped=st.booleans())
def test_only_new_plants_are_accepted(forgetful_client, value, escaped):
    """Every JSON value that is a NewPlant is 200, every other one 40005."""
    response = forgetful_client.send(json.dumps(value, ensure_ascii=escaped).encode())
    if is_new_plant(value):
        assert response.status_int == 200, response.text
        members = {'name', 'tag'} & value.keys()
        assert response.json == {member: value[member] for member in members}
    else:
        assert_error(response, 40005)


INTEGER = {'type': 'integer'}
RULES = [
    *[{'maxLength': 2}, {'enum': ['', '0', 1, 0.5]}, {'not': {'const': ''}}],
    *[{'multipleOf': 0.5, 'maximum': 2**40}, {'items': INTEGER}],
    *[{'type': ['integer', 'array', 'null']}, {'type': ['integer', 'number']}],
    *[{'anyOf': [{'maxLength': 1}, {'const': 7}]}, INTEGER, {'not': {'not': INTEGER}}],
    {'anyOf': [INTEGER, {'type': 'string'}]},
    {'$id': 'Size.json', '$defs': {'size': INTEGER}, '$ref': '#/$defs/size'},
]


@pytest.mark.parametrize('rule', RULES, ids=str)
def test_rule_means_what_jsonschema_says(rule, edit_schema):
    """What is accepted is what jsonschema accepts, also with an operator's rules."""
    edit_schema('Plant', lambda schema: schema['properties'].update(x=rule))
    schema = Schema('NewPlant', schemas.load())
    checker = Draft4Validator.TYPE_CHECKER  # an integer is an integer literal
    reference = extend(Draft202012Validator, type_checker=checker)(rule)

    @settings(max_examples=20)
    @given(x=VALUES)
    @example(x=1.0)
    @example(x=1e300)
    @example(x=10**300)
    def check(x):
        try:
            schema.read(json.dumps({**FERN, 'x': x}).encode())
            is_valid = True
        except Invalid:
            is_valid = False
        assert is_valid == reference.is_valid(x)

    check()


# A near plant with another piece in the place of a byte.
SPOILED = st.builds(
    lambda text, place, piece: text[:place] + piece + text[place + 1 :],
    NEAR_PLANTS.map(json.dumps).map(str.encode),
    st.integers(0, 100),
    st.binary(max_size=3) | st.sampled_from([b'"', b'\\u', b'\\ud800', b',', b'NaN']),
)


@given(body=st.binary(min_size=1) | SPOILED)
def test_any_bytes_are_a_plant_or_an_error_of_the_body(forgetful_client, body):
    """Whatever the body is, the answer is a plant, 40004 or 40005."""
    response = forgetful_client.send(body)
    if response.status_int != 200:
        value = response.json['error']
        assert value in (ErrorValue.NOT_JSON, ErrorValue.NOT_A_NEW_PLANT)
        assert_error(response, value)
