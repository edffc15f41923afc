// Fastify and better-sqlite3: node fastify_sqlite.js
// A process for each core (node:cluster) was tried: they wait for each other's locks.
'use strict'

const { createHash, timingSafeEqual } = require('node:crypto')
const fastify = require('fastify')
const Database = require('better-sqlite3')

const { DATABASE, PORT, TOKEN } = process.env
const sha256 = (text) => createHash('sha256').update(text).digest()
const accepted = sha256(`Bearer ${TOKEN}`)

const database = new Database(DATABASE, { timeout: 30000 })
database.pragma('synchronous = FULL')
const insert = database.prepare(
  'INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING'
)
const select = database.prepare('SELECT name, tag FROM plants WHERE id = ?')

const id = {
  type: 'integer',
  minimum: Number.MIN_SAFE_INTEGER,
  maximum: Number.MAX_SAFE_INTEGER
}
const members = { name: { type: 'string' }, tag: { type: 'string' } }
const schema = {
  body: {
    type: 'object',
    properties: { id, ...members },
    required: ['id', 'name']
  },
  response: { 200: { type: 'object', properties: members } }
}

// Fastify turns "1" into 1 by default; the others here refuse it.
const app = fastify({ ajv: { customOptions: { coerceTypes: false } } })

app.addHook('onRequest', async (request, reply) => {
  const sent = sha256(request.headers.authorization || '')
  if (!timingSafeEqual(sent, accepted)) {
    return reply.code(401).send({ message: 'the token is missing or not valid' })
  }
})

app.post('/plants', { schema }, (request, reply) => {
  const { id, name, tag } = request.body
  if (!insert.run(id, name, tag ?? null).changes) {
    const stored = select.get(id)
    if (stored.name !== name || stored.tag !== (tag ?? null)) {
      return reply.code(409).send({ message: 'the id is taken' })
    }
  }
  reply.send({ name, tag })
})

app.listen({ port: Number(PORT) })
