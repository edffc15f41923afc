"""FastAPI, uvicorn and psycopg 3: ``uvicorn --workers 2 fastapi_psycopg:app``."""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends
from fastapi import FastAPI
from fastapi import HTTPException
from fastapi.security import HTTPAuthorizationCredentials
from fastapi.security import HTTPBearer
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel
from pydantic import Field
from pydantic import StrictInt
from pydantic import StrictStr

TOKEN = os.environ['TOKEN']
CONNECTIONS = int(os.environ['CONNECTIONS'])


class Plant(BaseModel):
    """What is answered."""

    name: StrictStr
    tag: StrictStr | None = None


class NewPlant(Plant):
    """What is sent."""

    id: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep a pool of connections, all open from the start."""
    async with AsyncConnectionPool(
        os.environ['DATABASE'],
        min_size=CONNECTIONS,
        max_size=CONNECTIONS,
        kwargs={'autocommit': True},
        open=False,
    ) as app.state.pool:
        yield


async def check_token(
    sent: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())],
) -> None:
    """Let nobody in without the token."""
    if not secrets.compare_digest(sent.credentials.encode(), TOKEN.encode()):
        raise HTTPException(401)


app = FastAPI(lifespan=lifespan)


@app.post(
    '/plants', dependencies=[Depends(check_token)], response_model_exclude_none=True
)
async def add_plant(plant: NewPlant) -> Plant:
    """Add a plant; psycopg prepares a statement that it has seen a few times."""
    async with app.state.pool.connection() as database:
        cursor = await database.execute(
            'INSERT INTO plants VALUES (%s, %s, %s) ON CONFLICT DO NOTHING',
            (plant.id, plant.name, plant.tag),
        )
        if not cursor.rowcount:
            cursor = await database.execute(
                'SELECT name, tag FROM plants WHERE id = %s FOR UPDATE', (plant.id,)
            )
            if await cursor.fetchone() != (plant.name, plant.tag):
                raise HTTPException(409, 'the id is taken')
    return plant
