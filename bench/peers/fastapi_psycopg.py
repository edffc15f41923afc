"""FastAPI, uvicorn and psycopg 3: ``uvicorn --workers 2 fastapi_psycopg:app``."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends
from fastapi import FastAPI
from fastapi import HTTPException
from fastapi_plants import NewPlant
from fastapi_plants import Plant
from fastapi_plants import check_token
from psycopg_pool import AsyncConnectionPool

CONNECTIONS = int(os.environ['CONNECTIONS'])


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
