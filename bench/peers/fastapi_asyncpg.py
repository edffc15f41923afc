"""FastAPI, uvicorn and asyncpg: ``uvicorn --workers 2 fastapi_asyncpg:app``."""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import asyncpg
from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field, StrictInt, StrictStr

CONNECTIONS = int(os.environ['CONNECTIONS'])
TOKEN = os.environ['TOKEN'].encode()


class Plant(BaseModel):
    """The response."""

    name: StrictStr
    tag: StrictStr | None = None


class NewPlant(Plant):
    """The request."""

    id: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


async def check_token(
    sent: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())],
) -> None:
    """Refuse a request without the token."""
    if not secrets.compare_digest(sent.credentials.encode(), TOKEN):
        raise HTTPException(401)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep a pool of connections, all open from the start."""
    async with asyncpg.create_pool(
        os.environ['DATABASE'], min_size=CONNECTIONS, max_size=CONNECTIONS
    ) as app.state.pool:
        yield


app = FastAPI(lifespan=lifespan)


@app.post(
    '/plants', dependencies=[Depends(check_token)], response_model_exclude_none=True
)
async def add_plant(plant: NewPlant) -> Plant:
    """Add a plant; asyncpg prepares each statement once for a connection."""
    async with app.state.pool.acquire() as database:
        added = await database.execute(
            'INSERT INTO plants VALUES ($1, $2, $3) ON CONFLICT DO NOTHING',
            *(plant.id, plant.name, plant.tag),
        )
        if added == 'INSERT 0 0':
            stored = await database.fetchrow(
                'SELECT name, tag FROM plants WHERE id = $1 FOR UPDATE', plant.id
            )
            if tuple(stored) != (plant.name, plant.tag):
                raise HTTPException(409, 'the id is taken')
    return plant
