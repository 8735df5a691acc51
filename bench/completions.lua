-- The request generator for wrk: POST /v1/completions with a body of exactly SIZE bytes.
--
--   wrk -t1 … -s completions.lua URL -- SIZE fixed|distinct
--
-- fixed: every request is the same string. distinct: the prompt opens with a number that rises with each
-- request, so no two bodies are equal and no prefix repeats (each thread of wrk has numbers of its own). Prompts are English words from a seeded sequence,
-- because a tokenizer's cost on one repeated letter says nothing.
-- `done` prints one line of JSON for the benchmark to read. Latencies are in µs.

local WORDS = {
  "the", "harbour", "was", "quiet", "before", "dawn", "and", "every", "lantern", "along", "stone", "quay",
  "had", "been", "put", "out", "except", "one", "which", "burned", "in", "a", "window", "above", "chandler",
  "where", "somebody", "sat", "awake", "counting", "barrels", "rope", "letters", "from", "people", "who",
  "promised", "to", "return", "with", "spring", "tide", "but", "never", "did", "although", "their", "names",
  "were", "still", "read", "aloud", "each", "winter", "by", "children", "understood", "only", "half", "of", "it",
}
local SEED = 20240607

local head, tail, whole, count = "", "", nil, 0
local threads = 0
thread_number = 0 -- global: set by wrk from setup(), in the thread's own state

function setup(thread)
  thread:set("thread_number", threads)
  threads = threads + 1
end

local function text_of(bytes)
  local state, parts, length = SEED, {}, 0
  while length < bytes do
    state = (state * 1103515245 + 12345) % 2147483648
    local word = WORDS[1 + math.floor(state / 65536) % #WORDS]
    parts[#parts + 1] = word
    length = length + #word + 1
  end
  return string.sub(table.concat(parts, " "), 1, bytes)
end

function init(args)
  local size = tonumber(args[1])
  local opening = '{"model":"m1","prompt":"'
  local closing = '","max_tokens":16}'
  local text = text_of(size - #opening - #closing - 13) -- 13: the number and a space
  head = "POST /v1/completions HTTP/1.1\r\nHost: " .. wrk.host .. ":" .. wrk.port
    .. "\r\nContent-Type: application/json\r\nContent-Length: " .. size .. "\r\n\r\n" .. opening
  tail = " " .. text .. closing
  whole = args[2] == "fixed" and head .. string.format("%012d", 0) .. tail or nil
end

function request()
  if whole then return whole end
  count = count + 1
  return head .. string.format("%02d%010d", thread_number, count) .. tail
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '{"seconds":%.6f,"requests":%d,"bytes":%d,"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d,'
      .. '"mean_us":%d,"p50_us":%d,"p90_us":%d,"p99_us":%d,"max_us":%d}\n',
    summary.duration / 1e6, summary.requests, summary.bytes, errors.connect, errors.read, errors.write,
    errors.status, errors.timeout, latency.mean, latency:percentile(50), latency:percentile(90), latency:percentile(99), latency.max))
end
