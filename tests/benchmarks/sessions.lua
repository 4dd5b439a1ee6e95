-- For wrk: the same body for each session in turn. Arguments: the file with the body, number of sessions, header.
-- Requests are made once; the last line that wrk prints is a JSON object for tests/benchmarks/wrk.py.

local requests, turn = {}, 0

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  local body = file:read("*a")
  file:close()
  for session = 1, tonumber(arguments[2]) do
    local headers = {
      ["Content-Type"] = "application/json",
      [arguments[3]] = string.format("rollout-%08d", session),
    }
    requests[session] = wrk.format("POST", nil, headers, body)
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format('{"requests": %d, "duration_us": %d, "failed": %d, "p50_us": %d, "p99_us": %d}\n',
    summary.requests, summary.duration, failed, latency:percentile(50), latency:percentile(99)))
end
