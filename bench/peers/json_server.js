// json-server as a module, with the token and the rules before its router.
'use strict'

const { createHash, timingSafeEqual } = require('node:crypto')
const fs = require('node:fs')
const jsonServer = require('json-server')

const { DATABASE, PORT, TOKEN } = process.env
const sha256 = (text) => createHash('sha256').update(text).digest()
const accepted = sha256(`Bearer ${TOKEN}`)

fs.writeFileSync(DATABASE, '{"plants": []}')
const server = jsonServer.create()
const router = jsonServer.router(DATABASE)

server.use(jsonServer.defaults({ logger: false, static: __dirname }))
server.use((request, response, next) => {
  if (timingSafeEqual(sha256(request.headers.authorization || ''), accepted)) next()
  else response.status(401).json({ message: 'the token is missing or not valid' })
})
server.use(jsonServer.bodyParser)
server.post('/plants', (request, response, next) => {
  const { id, name, tag } = request.body
  const valid = Number.isSafeInteger(id) && typeof name === 'string' &&
    (tag === undefined || typeof tag === 'string')
  if (!valid) return response.status(400).json({ message: 'not a new plant' })
  const stored = router.db.get('plants').getById(id).value()
  if (!stored) return next()
  if (stored.name === name && stored.tag === tag) return response.json({ name, tag })
  response.status(409).json({ message: 'the id is taken' })
})
server.use(router)
server.listen(Number(PORT), '127.0.0.1')
// It writes the whole file for each plant: end between two, not within one.
process.on('SIGTERM', () => process.exit())
