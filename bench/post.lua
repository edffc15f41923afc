-- wrk script: post plants with new ids to the URL. Each request has a new traceparent and
-- a new X-Request-Id, as behind a tracing proxy: no server may know a head already.
-- Arguments: the token, the first id, and the body with %d for the id.
local threads = 0

function setup(thread)
   thread:set("number", threads)
   threads = threads + 1
end

function init(args)
   headers = {
      ["Authorization"] = "Bearer " .. args[1],
      ["Content-Type"] = "application/json",
   }
   id = tonumber(args[2]) + number * 1000000000
   body = args[3]
end

function request()
   id = id + 1
   local trace = string.format("%016x", id * 7919)
   headers["traceparent"] = "00-" .. trace .. trace .. "-" .. trace .. "-01"
   headers["X-Request-Id"] = trace
   return wrk.format("POST", nil, headers, string.format(body, id))
end

function done(summary, latency, requests)
   local errors = summary.errors
   io.write(string.format(
      "RESULT %d %d %d %d %.1f %.1f\n",
      summary.requests, summary.duration, errors.status,
      errors.connect + errors.read + errors.write + errors.timeout,
      latency:percentile(99), latency.max
   ))
end
