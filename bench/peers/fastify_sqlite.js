// Fastify and better-sqlite3: node fastify_sqlite.js
// One process: two (node:cluster) were slower, because each waits for the other's lock.
'use strict'

const Database = require('better-sqlite3')
const { serve } = require('./fastify_plants')

const database = new Database(process.env.DATABASE, { timeout: 30000 })
database.pragma('synchronous = FULL')
const insert = database.prepare(
  'INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING'
)
const select = database.prepare('SELECT name, tag FROM plants WHERE id = ?')

serve((id, name, tag) =>
  insert.run(id, name, tag).changes ? { name, tag } : select.get(id)
)
