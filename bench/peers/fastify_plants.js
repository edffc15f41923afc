// The code that the two Fastify services share: the token, the shapes, the responses.
'use strict'

const { createHash, timingSafeEqual } = require('node:crypto')
const fastify = require('fastify')

const { PORT, TOKEN } = process.env
const sha256 = (text) => createHash('sha256').update(text).digest()
const accepted = sha256(`Bearer ${TOKEN}`)

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

// Serve POST /plants. add(id, name, tag) returns (or resolves to) the plant that is
// stored under the id.
exports.serve = (add) => {
  // Fastify turns "1" into 1 by default; the other contenders refuse "1".
  const app = fastify({ ajv: { customOptions: { coerceTypes: false } } })

  app.addHook('onRequest', async (request, reply) => {
    const sent = sha256(request.headers.authorization || '')
    if (!timingSafeEqual(sent, accepted)) {
      return reply.code(401).send({ message: 'the token is missing or not valid' })
    }
  })

  app.post('/plants', { schema }, async (request, reply) => {
    const { id, name, tag } = request.body
    const stored = await add(id, name, tag ?? null)
    if (stored.name !== name || stored.tag !== (tag ?? null)) {
      return reply.code(409).send({ message: 'the id is taken' })
    }
    return { name, tag }
  })

  app.listen({ port: Number(PORT) })
}
