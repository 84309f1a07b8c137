-- Replays whole requests, signed beforehand, in a ring; a thread begins at an offset of its own.
-- Arguments after `--`: the file of heads ("<length>\n<bytes>" each) and the file of the body ("" for none).
local threads = 0

function setup(thread)
  thread:set("index", threads)
  threads = threads + 1
end

function init(args)
  local heads, body = {}, ""
  if args[2] and args[2] ~= "" then
    local file = assert(io.open(args[2], "rb"))
    body = file:read("*a")
    file:close()
  end
  local stride = tonumber(args[3])
  local file = assert(io.open(args[1], "rb"))
  local seen = 0
  while true do
    local length = file:read("*n")
    if not length then break end
    file:read(1)
    local head = file:read(length)
    -- a large body is held once a thread and key, so the keys are dealt out
    if seen % stride == index % stride then heads[#heads + 1] = head .. body end
    seen = seen + 1
  end
  file:close()
  requests = heads
  cursor = math.floor(#heads * index / 7) % #heads
end

function request()
  cursor = cursor % #requests + 1
  return requests[cursor]
end

function done(summary, latency, _)
  local e = summary.errors
  io.write(string.format(
    '\n@ {"requests": %d, "seconds": %.6f, "bytes": %d, "errors": %d, "p50_ms": %.4f, "p99_ms": %.4f, "max_ms": %.4f}\n',
    summary.requests, summary.duration / 1e6, summary.bytes,
    e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000, latency.max / 1000))
end
