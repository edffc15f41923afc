"""Post plants to a contender: one, a few that it must refuse, as many as it takes."""

from __future__ import annotations

import http.client
import subprocess
import time
from typing import NamedTuple

from bench.contenders import HERE
from bench.contenders import Contender
from bench.serving import PATIENCE
from bench.serving import Failed
from bench.serving import Server

FIRST_ID = 1


class Load(NamedTuple):
    """What wrk has seen.

    Attributes:
        answers: How many requests were answered, all of them with 2xx.
        rate: The same a second.
        p50_ms: Half of the answers took no longer.
        p99_ms: All but one in a hundred took no longer.
    """

    answers: int
    rate: float
    p50_ms: float
    p99_ms: float


def post(port: int, target: str, token: str | None, body: str) -> int:
    """Post a body on a connection of its own; return the status of the answer."""
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=PATIENCE)
    headers = {'Content-Type': 'application/json'}
    if token is not None:
        headers['Authorization'] = f'Bearer {token}'
    try:
        connection.request('POST', target, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def first_answer(server: Server, contender: Contender) -> float:
    """Post the first plant; return the seconds from the start to its 2xx."""
    while True:
        try:
            status: int | str = post(
                server.port,
                contender.target,
                contender.token,
                contender.body % FIRST_ID,
            )
        except OSError as ex:
            status = str(ex)
        now = time.perf_counter()
        if status in (200, 201):
            return now - server.began
        if server.process.poll() is not None:
            raise Failed('it has ended')
        if now - server.began > PATIENCE:
            raise Failed(f'not ready within {PATIENCE} s: {status}')
        time.sleep(0.002)


def load(
    server: Server, contender: Contender, connections: int, seconds: int, first_id: int
) -> Load:
    """Post as many new plants as a server takes, on kept connections.

    Raises:
        Failed: A request was not answered, or not with 2xx.
    """
    command = [
        *('wrk', '-t2', f'-c{connections}', f'-d{seconds}s', f'--timeout={PATIENCE}s'),
        *(
            '-s',
            f'{HERE}/post.lua',
            f'http://127.0.0.1:{server.port}{contender.target}',
        ),
        *('--', contender.token, f'{first_id}', contender.body),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 2 * PATIENCE
    )
    if done.returncode:
        raise Failed(f'wrk: {done.stderr.strip()}')
    line = next(x for x in done.stdout.splitlines() if x.startswith('RESULT'))
    answers, microseconds, refused, broken, p50, p99 = map(float, line.split()[1:])
    if refused or broken:
        raise Failed(f'{refused:.0f} answers not 2xx, {broken:.0f} requests without')
    return Load(int(answers), answers / microseconds * 1e6, p50 / 1e3, p99 / 1e3)


def check_manners(server: Server, contender: Contender) -> None:
    """See that a contender that has the first plant refuses what it must."""
    plant, token = contender.body % FIRST_ID, contender.token
    for what, sent, body, accepted in (
        ('no token', None, plant, (401, 403)),
        ('a wrong token', f'{token}x', plant, (401, 403)),
        ('a name that is null', token, plant.replace('"Fern"', 'null'), (400, 422)),
        ('a taken id', token, plant.replace('Fern', 'Rose'), (400, 409)),
        ('the same plant again', token, plant, (200,) if contender.repeats else (400,)),
    ):
        status = post(server.port, contender.target, sent, body)
        if status not in accepted:
            raise Failed(f'{what}: {status}')
