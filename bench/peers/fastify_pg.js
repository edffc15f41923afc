// Fastify and pg, two processes: node fastify_pg.js
'use strict'

const cluster = require('node:cluster')
const { Pool } = require('pg')
const { serve } = require('./fastify_plants')

const { CONNECTIONS, DATABASE } = process.env
const insert = 'INSERT INTO plants VALUES ($1, $2, $3) ON CONFLICT DO NOTHING'
const select = 'SELECT name, tag FROM plants WHERE id = $1 FOR UPDATE'

if (cluster.isPrimary) {
  cluster.fork()
  cluster.fork()
} else {
  const pool = new Pool({ connectionString: DATABASE, max: Number(CONNECTIONS) })
  // pg prepares a statement that has a name once for each connection.
  serve(async (id, name, tag) => {
    const values = [id, name, tag]
    const added = await pool.query({ name: 'insert', text: insert, values })
    if (added.rowCount) return { name, tag }
    const found = await pool.query({ name: 'select', text: select, values: [id] })
    return found.rows[0]
  })
}
