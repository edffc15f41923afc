"""FastAPI, uvicorn and SQLite: ``uvicorn --workers 2 fastapi_sqlite:app``.

A commit holds up the event loop, as it does in better-sqlite3. FastAPI's manual sends
what blocks to a pool of threads (``def`` instead of ``async def``). With a connection
for each thread, and with one for all, that took fewer plants a second.
"""

import os
import secrets
import sqlite3
from typing import Annotated

from fastapi import Depends
from fastapi import FastAPI
from fastapi import HTTPException
from fastapi.security import HTTPAuthorizationCredentials
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic import Field
from pydantic import StrictInt
from pydantic import StrictStr

TOKEN = os.environ['TOKEN']


class Plant(BaseModel):
    """What is answered."""

    name: StrictStr
    tag: StrictStr | None = None


class NewPlant(Plant):
    """What is sent."""

    id: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


async def check_token(
    sent: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())],
) -> None:
    """Let nobody in without the token."""
    if not secrets.compare_digest(sent.credentials.encode(), TOKEN.encode()):
        raise HTTPException(401)


# Each statement is a transaction of its own.
database = sqlite3.connect(os.environ['DATABASE'], timeout=30, isolation_level=None)
database.execute('PRAGMA synchronous = FULL')
app = FastAPI()


@app.post(
    '/plants', dependencies=[Depends(check_token)], response_model_exclude_none=True
)
async def add_plant(plant: NewPlant) -> Plant:
    """Add a plant."""
    cursor = database.execute(
        'INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING',
        (plant.id, plant.name, plant.tag),
    )
    if not cursor.rowcount:
        stored = database.execute(
            'SELECT name, tag FROM plants WHERE id = ?', (plant.id,)
        ).fetchone()
        if stored != (plant.name, plant.tag):
            raise HTTPException(409, 'the id is taken')
    return plant
