-- wrk script: post plants with new ids. Argument: the first id.
local threads = 0

function setup(thread)
   thread:set("number", threads)
   threads = threads + 1
end

function init(args)
   id = tonumber(args[1]) + number * 1000000000
   headers = {
      ["Authorization"] = "Bearer bench",
      ["Content-Type"] = "application/json",
   }
end

function request()
   id = id + 1
   local body = string.format('{"id": %d, "name": "Fern", "tag": "shade"}', id)
   return wrk.format("POST", "/plants", headers, body)
end

function done(summary, latency, requests)
   local errors = summary.errors
   io.write(string.format(
      "RESULT %d %d %d %d %.1f %.1f\n",
      summary.requests, summary.duration, errors.status,
      errors.connect + errors.read + errors.write + errors.timeout,
      latency:percentile(50), latency:percentile(99)
   ))
end
