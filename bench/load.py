"""Send requests: the first plant, some that must be refused, then the load."""

import http.client
import math
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from bench.serving import PATIENCE, Failed, Server

TOKEN = 'bench'  # every contender accepts it
PLANT = '{"id": %d, "name": "Fern", "tag": "shade"}'
FIRST_PLANT = PLANT % 1
PLANT_WITHOUT_NAME = FIRST_PLANT.replace('"Fern"', 'null')
ANOTHER_PLANT = FIRST_PLANT.replace('Fern', 'Rose')  # with the id of the first
SCRIPT = Path(__file__).with_name('post.lua')


class Load(NamedTuple):
    """The figures of wrk.

    Attributes:
        answers: The number of responses, all of them with 2xx.
        rate: Responses a second.
        p99_ms: 99th percentile of the latency.
        max_ms: The longest latency.
    """

    answers: int
    rate: float
    p99_ms: float
    max_ms: float


def post(port: int, body: str, token: str | None = TOKEN) -> int:
    """Post a body on a new connection; return the status of the response."""
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=PATIENCE)
    headers = {'Content-Type': 'application/json'}
    if token is not None:
        headers['Authorization'] = f'Bearer {token}'
    try:
        connection.request('POST', '/plants', body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def first_answer(server: Server) -> float:
    """Post the first plant; return the seconds from the start to its 200."""
    while True:
        try:
            status: int | str = post(server.port, FIRST_PLANT)
        except OSError as ex:
            status = str(ex)
        now = time.perf_counter()
        if status == 200:
            return now - server.began
        if server.process.poll() is not None:
            raise Failed('the server has ended')
        if now - server.began > PATIENCE:
            raise Failed(f'not ready within {PATIENCE} s: {status}')
        time.sleep(0.002)


def load(server: Server, connections: int, seconds: int, first_id: int) -> Load:
    """Post as many new plants as a server can take, on persistent connections.

    Raises:
        Failed: A request was not answered, or not with 2xx.
    """
    command = [
        *('wrk', '-t2', f'-c{connections}', f'-d{seconds}s', f'--timeout={PATIENCE}s'),
        *('-s', f'{SCRIPT}', f'http://127.0.0.1:{server.port}/plants'),
        *('--', TOKEN, f'{first_id}', PLANT),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 2 * PATIENCE
    )
    if done.returncode:
        raise Failed(f'wrk: {done.stderr.strip()}')
    line = next(x for x in done.stdout.splitlines() if x.startswith('RESULT'))
    answers, microseconds, refused, broken, *latencies = map(float, line.split()[1:])
    if refused or broken:
        raise Failed(f'{refused:.0f} answers not 2xx, {broken:.0f} requests without')
    rate = answers / microseconds * 1e6
    if not answers:
        latencies = [math.inf] * len(latencies)
    return Load(int(answers), rate, *(latency / 1e3 for latency in latencies))


def check_answers(server: Server) -> None:
    """Check the responses to invalid and repeated requests after the first plant.

    Raises:
        Failed: A response has the wrong status.
    """
    for what, token, body, accepted in (
        ('no token', None, FIRST_PLANT, (401, 403)),
        ('a wrong token', f'{TOKEN}x', FIRST_PLANT, (401, 403)),
        ('a name that is null', TOKEN, PLANT_WITHOUT_NAME, (400, 422)),
        ('a taken id', TOKEN, ANOTHER_PLANT, (400, 409)),
        ('the same plant again', TOKEN, FIRST_PLANT, (200,)),
    ):
        status = post(server.port, body, token)
        if status not in accepted:
            raise Failed(f'{what}: {status}')
