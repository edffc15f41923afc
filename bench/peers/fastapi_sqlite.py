"""FastAPI, uvicorn and SQLite: ``uvicorn --workers 2 fastapi_sqlite:app``.

A commit blocks the event loop, as it does in better-sqlite3. FastAPI's manual runs
blocking code in a pool of threads (``def`` instead of ``async def``). With a connection
for each thread, and with one for all, that added fewer plants a second.
"""

import os
import sqlite3

from fastapi import Depends, FastAPI, HTTPException
from fastapi_plants import NewPlant, Plant, check_token

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
