"""Hooks of schemathesis (SCHEMATHESIS_HOOKS): rules that JSON Schema cannot state."""

import itertools

import schemathesis

new_ids = itertools.count(-1_000_000, -1)
used_ids = set()


@schemathesis.hook
def before_call(context, case, kwargs):
    """Give each plant an integer literal for its id, and no other plant's.

    To JSON Schema 1.0 is an integer, and it does not know which ids are taken.
    """
    if isinstance(case.body, dict) and 'id' in case.body:
        id = case.body['id']
        if type(id) is float and id.is_integer():
            id = int(id)
        if type(id) is int and id in used_ids:
            id = next(new_ids)
        if type(id) is int:
            used_ids.add(id)
        case.body['id'] = id


@schemathesis.check
def status_is_described(ctx, response, case):
    """Require a description of each status: ``default`` would describe any."""
    assert response.status_code in {200, 400, 401, 405}
