"""Flask, gunicorn and SQLite: ``gunicorn --workers 2 --threads 8 flask_sqlite:app``."""

import os
import secrets
import sqlite3
import threading

from flask import Flask, abort, request
from werkzeug.exceptions import HTTPException

TOKEN = os.environ['TOKEN']


class Local(threading.local):
    """A connection for each thread; each statement is a transaction of its own."""

    def __init__(self) -> None:
        self.database = sqlite3.connect(
            os.environ['DATABASE'], timeout=30, isolation_level=None
        )
        self.database.execute('PRAGMA synchronous = FULL')


local = Local()
app = Flask(__name__)


@app.errorhandler(HTTPException)
def answer_error(ex: HTTPException):
    """Answer errors with JSON, too."""
    return {'error': ex.code, 'message': ex.description}, ex.code


@app.before_request
def check_token():
    """Refuse a request without the token."""
    sent = request.authorization
    if sent is None or sent.type != 'bearer' or not sent.token:
        abort(401)
    if not secrets.compare_digest(sent.token.encode(), TOKEN.encode()):
        abort(401)


@app.post('/plants')
def add_plant():
    """Add a plant."""
    plant = request.get_json()
    if not isinstance(plant, dict):
        abort(400, 'not an object')
    id, name, tag = plant.get('id'), plant.get('name'), plant.get('tag')
    if type(id) is not int or not -(2**63) <= id < 2**63:
        abort(400, 'id: not a 64-bit integer')
    if not isinstance(name, str):
        abort(400, 'name: not a string')
    if 'tag' in plant and not isinstance(tag, str):
        abort(400, 'tag: not a string')
    cursor = local.database.execute(
        'INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING', (id, name, tag)
    )
    if not cursor.rowcount:
        stored = local.database.execute(
            'SELECT name, tag FROM plants WHERE id = ?', (id,)
        ).fetchone()
        if stored != (name, tag):
            abort(409, 'the id is taken')
    return {'name': name} if tag is None else {'name': name, 'tag': tag}
