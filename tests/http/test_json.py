"""Bodies: JSON text, the schema files, and the messages about both."""

import json
import sys
from unittest.mock import Mock

import pytest
from exchange import assert_error
from machine import edit
from server import GUNICORN, Server, finished, request
from test_contract import FERN

from store import Plant, PlantStore
from web import body as body_module

shortly = '{!a:.40}'.format  # names a case, whatever bytes it has


# JSON text, of an unknown member.
ACCEPTED = [
    *[b'\r\n\r\n\t false \t\n\n', b' ' * 60_000 + b'1', b'-9223372036854775809'],
    *[b'-1.25e-02', b'1e999', b'1' * 1000, b'"\\u0000\\u2028\\ufeff\\uffff"'],
    *[b'"\xef\xbb\xbf\xef\xbf\xbf"', b'"// no /* comment */, NaN"'],
    # pairs of surrogates, and what only looks like a surrogate
    *[b'"\\ud83d\\ude00\\uD83D\\uDE00"', b'{"\\ud800\\udc00":1}', b'"\\\\ud800 ud800"'],
    *[b'[{"a":1,"A":2},{"a":2.0},null,true]', b'[' * 63 + b']' * 63],
]

# Words without white space; then bytes.
REFUSED = rb"""
] ["a {"a": 1,2 {}{} True 'a' {a:1} [1,] {"a":1,} /**/1 01 .5 \uff11 "\x41" "\u123g"
NaN -NaN Infinity -Infinity [NaN] {"a":-Infinity}
{"a":1,"a":1} [[{"b":[{"a":1,"a":2}]}]] {"a":1,"\u0061":2} {"\ud800":1,"\ud800":2}
"\ud800" "\uDFFF" "x\ude00" "\ude00\ud83d" "\ud83d\\ude00" [["\udfff"]] {"\ud800":1}
""".split()
REFUSED += [b'"\0"', b'"\n"', b'"\x1f"', b'1\0', b'\x0b1', '\xa01'.encode()]
REFUSED += [b'1' * 5000, b'-%s' % (b'1' * 60_000)]
REFUSED += [b'{%s}' % b','.join([b'"%s":1' % (b'a' * 10_000)] * 2)]
REFUSED += [b'\xff', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xe2\x82', b'\xef\xbb\xbf{}']
REFUSED += ['{"a":"\xe9"}'.encode(name) for name in ('utf-16', 'latin-1')]


@pytest.mark.parametrize('text', [*ACCEPTED, *REFUSED], ids=shortly)
def test_text_is_json_or_refused(text, service):
    """As a body, and in a member; what is wrong is said shortly."""
    bodies = text, b'{"id":1000000000,"name":"Fern","x":%s}' % text
    answers = [service.ask(request(body=body)) for body in bodies]
    if text in ACCEPTED:
        assert_error(answers[0], 40005)
        assert answers[1].json == {'name': 'Fern'}
    else:
        assert max(len(assert_error(answer, 40004)) for answer in answers) < 200


SHAPES = {
    'arrays': lambda depth: b'[' * depth + b']' * depth,
    'objects': lambda depth: b'{"a":' * depth + b'1' + b'}' * depth,
    'surrogates': lambda depth: b'[' * depth + b'"\\ud83d\\ude00"' + b']' * depth,
}


@pytest.mark.parametrize('shape', SHAPES)
def test_64_levels_are_read_and_100_000_refused(shape, serve, store):
    """The plant is one of the 64 levels; any number of levels ends in an answer."""
    client = serve(store, max_body_bytes=2_000_000)
    body = b'{"id":1,"name":"Fern","x":%s}'
    assert client.send(body % SHAPES[shape](63)).json == {'name': 'Fern'}
    in_tag = body.replace(b'"x"', b'"tag"') % SHAPES[shape](63)
    assert_error(client.send(in_tag), 40005)
    deep = SHAPES[shape](100_000)
    for text in (deep, deep[:300_000], body % deep, body % deep[:-1]):
        assert_error(client.send(text), 40004)
    for depth in range(200, 1100, 50):  # the limits of the parts, on the way
        response = client.send(body % SHAPES[shape](depth))
        assert response.json.get('error', 40004) == 40004


# An id, and how much of it the message shows.
IDS = [
    *[(text, text) for text in ('1.0', '-0.0', 'true', 'null', '"1"', '1.5', '[1]')],
    *[('1e3', '1000.0'), ('1e999', ''), (-(2**63) - 1, ''), (2**63, '')],
    *[('9223372036854775807.0', ''), ('1' * 1000, '')],
]
FAULTS = {
    **{f'{{"id":{id},"name":""}}': {'id': shown} for id, shown in IDS},
    '{}': {'id': '', 'name': ''},
    '{"id":"1","name":null,"tag":["é"]}': {'id': '"1"', 'name': '', 'tag': '["é"]'},
    '{"id":1,"name":"Fern","tag":null}': {'tag': 'null is not a string: leave it out'},
    '{"id":2.0,"name":null}': {'id': '2.0', 'name': 'null is not a string'},
    '{"id":2.0,"name":"Fern","tag":7,"size":null}': {'id': '2.0', 'tag': '7'},
    # SQL text cannot hold U+0000.
    r'{"id":1,"name":"a\u0000b","tag":"\u0000"}': {'name': r'a\u0000b', 'tag': ''},
    '[]': {'body': '[]'},
    f'{{"id":1,"name":{"1" * 999}}}': {'name': '1' * 50},
}


@pytest.mark.parametrize(('body', 'faults'), FAULTS.items(), ids=shortly)
def test_message_lists_every_fault_with_member_and_value(body, faults, service):
    """Each fault names its member, is listed once, and shows the value, cut short."""
    before = service.plants()
    answer = service.ask(request(body=body.encode()))
    sentences = assert_error(answer, 40005).split('; ')
    assert sorted({text.partition(': ')[0] for text in sentences}) == [*faults]
    assert len(sentences) == len(faults) or '1e999' in body
    assert all(shown in '; '.join(sentences) for shown in faults.values())
    assert max(map(len, sentences)) < 200
    assert service.plants() == before


POTS = {'items': {'required': ['size'], 'properties': {'size': {'type': 'integer'}}}}
# The file that an operator edits, a member and its rule, a value that breaks that, and
# what the message has of both.
EDITS = [
    ('Plant', 'name', {'maxLength': 4}, 'Ferns', ['name: ', '"Ferns"']),
    ('NewPlant', 'name', {'maxLength': 4}, 'Ferns', ['name: ', '"Ferns"']),
    ('Plant', 'pots', POTS, [{'size': 'big'}, {}], ['pots.0.size: ', 'pots.1.size: ']),
    ('Plant', 'size', {'unevaluatedProperties': False}, {'x' * 999: 1}, ['size: ']),
    ('Plant', 'name', {'pattern': r'^\p{L}{1,255}$'}, 'Fern 2', ['name: ', r'^\p{L}']),
    ('Plant', 'pots', POTS, [{}] * 5_000, ['pots.0.size: ', 'pots.99.size: ']),
    # For seconds, without a limit.
    ('Plant', 'name', {'pattern': '^F|(?<!x)(a+)+$'}, 'a' * 50_000 + 'b', ['limit']),
]


@pytest.mark.parametrize(('file', 'member', 'rule', 'value', 'words'), EDITS)
def test_edited_rule_holds(file, member, rule, value, words, edit_schema, serve, store):
    """An edit holds from the next start on, whatever draft a file names."""
    running, other = serve(store), {'$schema': 'http://json-schema.org/draft-07/schema'}
    edit_schema(file, lambda schema: schema['properties'].update({member: rule}))
    edit_schema('Plant', lambda schema: schema.update(other))
    client = serve(store)
    assert client.add(FERN).status_int == 200
    message = assert_error(client.add({**FERN, 'id': 2, member: value}), 40005)
    assert all(word in message for word in words)
    assert len(message) < 3_000
    assert list(store) == [Plant(**FERN)]
    assert running.add({**FERN, 'id': 2, member: value}).status_int == 200


def test_no_store_gets_what_is_no_plant(edit_schema, serve):
    """Whatever an operator has removed, and whatever a store of others checks."""
    edit_schema('NewPlant', dict.clear)
    client = serve(store := Mock(PlantStore))
    assert 'body' in assert_error(client.send(b'[]'), 40005)
    message = assert_error(client.add({'id': 2.0, 'tag': '\0'}), 40005)
    assert [it.partition(':')[0] for it in message.split('; ')] == ['id', 'name', 'tag']
    assert store.add.mock_calls == []


# What is made of a file: nothing, bytes, or a rule of a member; then words about it.
# Error.json is in the description alone, which clients read.
BROKEN = [
    *[('NewPlant', None, 'No such file'), ('Plant', b'true', 'not a mapping')],
    *[('Plant', b'{', 'property name'), ('Plant', b'\xff', 'decode')],
    *[('Plant', {'type': 'strin'}, 'strin'), ('Error', {'type': 'strin'}, 'strin')],
    *[('Plant', {'pattern': '('}, '"("'), ('Error', {'pattern': '('}, '"("')],
    *[('Plant', {'pattern': each}, each) for each in (r'\Z', 'a{1000000}')],  # Python's
    ('Plant', b'{"type": {}, "type": []}', "the member 'type'"),
    *[(name, {'$ref': 'Plont.json'}, 'Plont.json') for name in ('Plant', 'NewPlant')],
    ('Plant', {'$ref': 'https://example.org/name.json'}, 'does not fetch'),
]


@pytest.mark.parametrize(('file', 'made', 'words'), BROKEN, ids=str)
def test_broken_schema_stops_the_start(file, made, words, edit_schema, serve, store):
    """An invalid schema is found at the start; one sentence says where."""
    path = body_module.DIRECTORY / f'{file}.json'
    if isinstance(made, dict):
        edit_schema(file, lambda schema: schema['properties'].update(size=made))
    else:
        path.unlink()
    if isinstance(made, bytes):
        path.write_bytes(made)
    where = 'schemas' if '$ref' in str(made) else rf'{file}\.json'
    with pytest.raises(ValueError, match=f'{where}: ') as raised:
        serve(store)
    assert str(raised.value).isprintable()
    assert words in str(raised.value)


def test_member_is_added_in_two_places(checkout):
    """``schemas/Plant.json`` and ``Plant``: it is checked, answered, stored, listed."""
    schema = checkout / 'schemas/Plant.json'
    edit(schema, '"tag": {', '"extra": {"type": "string"}, "tag": {')
    tag = '    tag: str | None = None'
    edit(checkout / 'store/base.py', tag, f'    extra: str | None = None\n{tag}')

    new = {'id': 1, 'name': 'Fern', 'extra': 'Peru'}
    moss = {'id': 2, 'name': 'Moss', 'tag': 'sun'}
    with Server(checkout, command=GUNICORN[:3]) as server:

        def add(**plant):
            return server.ask(request(body=plant)).json

        for _ in range(2):
            assert add(**new) == {'name': 'Fern', 'extra': 'Peru'}
        assert add(**new | {'extra': 'Chile'})['error'] == 40006
        assert add(**new | {'id': 3, 'extra': 4})['error'] == 40005
        assert add(**moss) == {'name': 'Moss', 'tag': 'sun'}
        description = server.ask(request('GET', '/openapi.json')).json
    members = description['components']['schemas']['NewPlant']['properties']
    assert members.keys() == {*Plant._fields, 'extra'}
    command = [sys.executable, '-m', 'store', 'list', 'jsonl:plants.jsonl']
    listed = finished(command, cwd=checkout).stdout.splitlines()
    assert [json.loads(line) for line in listed] == [new, moss]
