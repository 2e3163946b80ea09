// The modules of the page that need no browser. Run by test_page.py: node --test tests/page

import assert from "node:assert/strict"
import { test } from "node:test"

import { Answer, describe, forkAt } from "../../aserve/http/static/answer.js"
import { inline, parse } from "../../aserve/http/static/markdown.js"
import { quantile, rate, readMetrics, total } from "../../aserve/http/static/prometheus.js"
import { chatBody, continuedBody, SettingError } from "../../aserve/http/static/request.js"
import { EventParser } from "../../aserve/http/static/sse.js"
import { imagesOf, messageContent, textOf } from "../../aserve/http/static/pictures.js"
import { cellsOf, ownersOf } from "../../aserve/http/static/pages.js"
import { lanes, phases, stepColumns, tell, tellStep, traceEvents } from "../../aserve/http/static/timeline.js"
import { Chats, DEFAULTS, titleOf } from "../../aserve/http/static/store.js"

const choice = (delta, more = {}) => ({ choices: [{ index: 0, delta, ...more }] })
const delta = (body) => choice(body)

test("events are the same at every cut, with any line end and comments between", () => {
  for (const end of ["\n", "\r\n", "\r"]) {
    const text = ['data: {"a": 1}', "", ": ping", "id: 3", "data: two", "data: lines", "", "data:tight", "", ""].join(end) + (end === "\r" ? "x" : "")
    for (let cut = 0; cut <= text.length; cut += 1) {
      const parser = new EventParser()
      assert.deepEqual([...parser.push(text.slice(0, cut)), ...parser.push(text.slice(cut))], ['{"a": 1}', "two\nlines", "tight"], `${JSON.stringify(end)} at ${cut}`)
    }
  }
})

test("an answer joins text, reasoning, tool calls and tokens, and tells its times", () => {
  const times = [0, 100, 300]
  const answer = new Answer(() => times.shift() ?? 300)
  answer.add(delta({ role: "assistant", content: "" }))
  answer.add(delta({ reasoning_content: "Hm" }))
  answer.add(choice({ content: "Hi" }, { logprobs: { content: [{ token: "Hi", logprob: -0.1, bytes: [72, 105], top_logprobs: [] }] } }))
  answer.add(delta({ tool_calls: [{ index: 1, id: "b", function: { name: "g", arguments: "" } }] }))
  answer.add(delta({ tool_calls: [{ index: 0, id: "a", function: { name: "f", arguments: '{"x"' } }] }))
  answer.add(delta({ tool_calls: [{ index: 0, function: { arguments: ": 1}" } }] }))
  answer.add(choice({}, { finish_reason: "tool_calls" }))
  answer.add({ choices: [], usage: { prompt_tokens: 7, completion_tokens: 5 }, seed: 0 })
  assert.equal(answer.message.reasoning_content, "Hm")
  assert.deepEqual(answer.message.tool_calls.map((call) => call.function), [
    { name: "f", arguments: '{"x": 1}' },
    { name: "g", arguments: "" },
  ])
  assert.equal(answer.figures.ttftMs, 100)
  assert.equal(answer.figures.rate, 20)
  assert.equal(describe(answer.figures, answer.finishReason, answer.seed), "5 tokens · 20 tok/s · first after 100 ms · tool calls · seed 0")
})

test("a fork joins bytes before it decodes them", () => {
  const bytes = [...new TextEncoder().encode("é")]
  const tokens = [{ text: "a", bytes: [97] }, { text: "\ufffd", bytes: [bytes[0]] }, { text: "z", bytes: [122] }]
  assert.equal(forkAt(tokens, 2, { text: "\ufffd", bytes: [bytes[1]] }), "aé")
})

const plain = (parts) => parts.map((part) => part.text ?? plain(part.inline)).join("")

test("markdown is read in blocks", () => {
  const text = "# Title\n\npara *one*\nline\n\n- a\n  - b\n- c\n\n3. x\n\n> q\n\n|h|i|\n|-|-|\n|1|2|\n\n---\n```py\nx = `1`\n"
  const blocks = parse(text)
  assert.deepEqual(blocks.map((block) => block.type), ["heading", "paragraph", "list", "list", "quote", "table", "rule", "code"])
  assert.equal(blocks[2].items.length, 2)
  assert.equal(blocks[2].items[0][1].type, "list")
  assert.equal(blocks[3].start, 3)
  assert.equal(blocks[5].rows.length, 1)
  assert.deepEqual(blocks[7], { type: "code", language: "py", text: "x = `1`\n" })
})

test("inline markdown is emphasis, code and safe links only", () => {
  const cases = [
    ["a **b *c*** d", ["text", "strong", "text"]],
    ["snake_case_name and 2 * 3 * 4", ["text"]],
    ["`a*b*` \\*c\\*", ["codespan", "text", "text", "text", "text"]],
    ["[x](https://e.org/a) [y](javascript:alert(1))", ["link", "text"]],
    ["<img src=x onerror=alert(1)>", ["text"]],
    ["unclosed **bold", ["text"]],
  ]
  for (const [text, types] of cases) assert.deepEqual(inline(text).map((part) => part.type), types, text)
})

test("no text makes markdown slow or lose a word", () => {
  const bad = ["*".repeat(4000), "[".repeat(4000), "`".repeat(3999), "> ".repeat(2000), "- ".repeat(2000), "**a ".repeat(2000), "_a".repeat(3000), "|".repeat(4000) + "\n|-|\n"]
  for (const text of bad) {
    const began = performance.now()
    parse(text)
    assert.ok(performance.now() - began < 2000, text.slice(0, 20))
  }
  assert.equal(plain(parse("one *two three\n\nfour **five").flatMap((block) => block.inline)), "one *two threefour **five")
})

test("metrics are read, and quantiles are of what came between two readings", () => {
  const reading = (counts) => readMetrics(`# HELP x\nrunning{a="b\\"}"} 2\nrunning{a="c"} 3\n${counts.map((count, at) => `t_bucket{le="${["0.1", "0.2", "+Inf"][at]}"} ${count}`).join("\n")}\n`)
  const [before, after] = [reading([5, 5, 5]), reading([5, 15, 15])]
  assert.equal(total(after, "running"), 5)
  assert.ok(Math.abs(quantile(before, after, "t", 0.5) - 0.15) < 1e-9)
  assert.equal(quantile(after, after, "t", 0.5), null)
  assert.equal(rate(readMetrics("n 10\n"), readMetrics("n 4\n"), "n", 2), 2)
})

test("a request has what was set, and a wrong setting is named", () => {
  const settings = { ...DEFAULTS, temperature: "0.5", system: "Be brief.", stop: "\\n\nEND", tools: '[{"type": "function"}]', schema: '{"type": "object"}', logprobs: true }
  const body = chatBody(settings, [{ role: "user", content: "hi", shown: { failure: null } }])
  assert.deepEqual(body.messages, [{ role: "system", content: "Be brief." }, { role: "user", content: "hi" }])
  assert.equal(body.temperature, 0.5)
  assert.equal("top_p" in body, false)
  assert.deepEqual(body.stop, ["\n", "END"])
  assert.equal(body.response_format.json_schema.schema.type, "object")
  assert.equal(continuedBody(settings, [], "On").messages.at(-1).content, "On")
  for (const [name, value] of [["top_p", "much"], ["tools", "{}"], ["schema", "[1"], ["extra", "3"]]) {
    assert.throws(() => chatBody({ ...DEFAULTS, [name]: value }, []), (error) => error instanceof SettingError && error.field === name)
  }
})

test("chats are kept, and the oldest go where there is no room", () => {
  const kept = {}
  let room = Infinity
  globalThis.localStorage = {
    getItem: (name) => kept[name] ?? null,
    setItem(name, value) {
      if (value.length > room) throw new Error("quota")
      kept[name] = value
    },
  }
  const chats = new Chats()
  for (const text of ["old", "new"]) chats.add([{ role: "user", content: text.repeat(100) }], text)
  assert.equal(chats.save(), null)
  room = kept["aserve.chats"].length - 1
  assert.match(chats.save(), /the 1 oldest/)
  assert.deepEqual(new Chats().all.map((chat) => chat.title), ["new"])
  const other = new Chats()
  assert.equal(other.import(chats.exported()), 1)
  assert.throws(() => other.import('{"chats": [{"messages": [{}]}]}'), /no chats/)
  kept["aserve.chats"] = "not JSON"
  assert.deepEqual(new Chats().all, [])
  assert.equal(titleOf([{ role: "user", content: "a ".repeat(60) }]).length, 48)
})

test("bars have the phases that happened, lanes do not overlap, and a trace has both", () => {
  const at = (received_s, admitted_s, first_token_s, ended_s) => ({ request_id: `r${received_s}`, received_s, admitted_s, first_token_s, ended_s, outcome: ended_s ? "finished" : "", prompt_tokens: 3, cached_tokens: 1, completion_tokens: { 0: 2, 1: 5 }, num_sequences: 2, num_admissions: 4 })
  const requests = [at(1, 2, 3, 5), at(2, 0, 0, 0), at(5, 5, 6, 7), at(3, 0, 0, 4)]
  assert.deepEqual(phases(requests[0], 9), [["queued", 1, 2], ["prefill", 2, 3], ["decode", 3, 5]])
  assert.deepEqual(phases(requests[1], 9), [["queued", 2, 9]])
  assert.deepEqual(phases(requests[3], 9), [["queued", 3, 4]])
  assert.deepEqual(lanes(requests, 9).map(([request, lane]) => [request.received_s, lane]), [[1, 0], [2, 1], [3, 2], [5, 0]])
  assert.equal(tell(requests[1], 9), "r2 · running · queued 7000 ms, retracted 2 times · 3 prompt tokens (1 cached), 7 generated")
  const { traceEvents: events } = traceEvents({ requests, steps: [{ at_s: 4, num_running: 2 }], now_s: 9 })
  assert.deepEqual(events.map((event) => event.ph).sort().join(""), "C" + "X".repeat(7))
  assert.ok(events.every((event) => Number.isInteger(event.ts) && (event.ph === "C" || event.dur > 0)))
})

test("a request that was watched has a bar for each state and prefill chunk", () => {
  const spans = [["tokenize", 1, 0], ["queue_pages", 1.5, 0], ["prefill", 2, 1], ["prefill", 3, 1], ["grammar", 4, 0], ["decode", 4.5, 0], ["retracted", 5, 0], ["decode", 9, 0]]
  const request = { request_id: "r", received_s: 1, ended_s: 8, outcome: "cancelled", prompt_tokens: 3, cached_tokens: 0, completion_tokens: {}, num_sequences: 1, num_admissions: 2, spans }
  assert.deepEqual(phases(request, 9).map(([kind, from, to]) => [kind, from, to]), [
    ["queued", 1, 1.5], ["queued", 1.5, 2], ["prefill", 2, 3], ["prefill", 3, 4], ["grammar", 4, 4.5], ["decode", 4.5, 5], ["retracted", 5, 8],
  ])
  assert.equal(tell(request, 9), "r · cancelled · tokenize 500 ms, queue pages 500 ms, prefill 2000 ms in 2 chunks, grammar 500 ms, decode 500 ms, retracted 3000 ms, retracted once · 3 prompt tokens (0 cached), 0 generated")
  const { traceEvents: events } = traceEvents({ requests: [request], steps: [], now_s: 9 })
  assert.deepEqual(events.map((event) => event.name), ["tokenize", "queue_pages", "prefill", "prefill", "grammar", "decode", "retracted"])
})

test("steps fill their pixels until the next one, or for half a second, and their times lie before them", () => {
  const step = (at_s, num_decode_rows, device_ms = 0) => ({ at_s, num_decode_rows, num_prefill_rows: num_decode_rows && 1, device_ms, host_ms: 25 })
  const x = (at) => (at - 10) * 10 // ten pixels a second
  const columns = stepColumns([step(10, 1), step(10.05, 3), step(10.2, 0), step(10.3, 2, 250), step(10.8, 0, 500)], 11, x)
  assert.deepEqual(columns.decode, [3, 3, 0, 2, 2, 2, 2, 2, 0, 0])
  assert.deepEqual(columns.prefill, [1, 1, 0, 1, 1, 1, 1, 1, 0, 0])
  const rounded = (shares) => shares.map((share) => Math.round(share * 100))
  assert.deepEqual(rounded(columns.device), [50, 100, 100, 100, 100, 100, 100, 100, 0, 0])
  assert.deepEqual(rounded(columns.host), [25, 25, 25, 0, 0, 0, 0, 25, 0, 0])
  const told = tellStep({ iteration: 7, num_decode_rows: 3, num_prefill_rows: 1, num_prefill_tokens: 64, device_ms: 2, host_ms: 0.26, num_running: 4, num_waiting: 0 })
  assert.equal(told, "step 7 · 3 decode rows, 1 prefill rows with 64 tokens · device 2.0 ms, host 0.3 ms · 4 running, 0 waiting")
})

test("every page has one owner, whatever the requests tell, and every owner a square", () => {
  const request = (prompt_tokens, cached_tokens, completion_tokens, more) => ({ request_id: "r", admitted_s: 1, ended_s: 0, prompt_tokens, cached_tokens, completion_tokens, ...more })
  const requests = [request(33, 16, { 0: 15 }), request(16, 0, { 0: 1, 1: 33 }), request(99, 0, {}, { ended_s: 2 }), request(0, 0, {}), request(64, 0, { 0: 1 }, { admitted_s: 0 })]
  const pagesOf = (owners) => owners.map(({ kind, pages }) => [kind, pages])
  const rest = [["shared", 1], ["cached", 30], ["free", 62]]
  assert.deepEqual(pagesOf(ownersOf(requests, { pages: 100, used: 8, cached: 30 }, 16)), [["request", 2], ["request", 5], ...rest])
  assert.deepEqual(pagesOf(ownersOf(requests, { pages: 100, used: 3, cached: 0 }, 16)), [["request", 2], ["request", 1], ["shared", 0], ["cached", 0], ["free", 97]])
  assert.deepEqual(cellsOf([{ pages: 2 }, { pages: 0 }, { pages: 1 }]).cells.map((owner) => owner.pages), [2, 2, 1])
  const large = cellsOf([{ pages: 1 }, { pages: 998 }, { pages: 1 }], 100)
  assert.equal(large.perCell, 10)
  assert.deepEqual(new Set(large.cells.map((owner) => owner.pages)), new Set([1, 998]))
  assert.ok(large.cells.length >= 100 && large.cells.length <= 103)
})

test("a message with pictures has parts, and gives its text and safe pictures back", () => {
  const url = "data:image/png;base64,AA=="
  assert.equal(messageContent("hi", []), "hi")
  const content = messageContent("hi", [url])
  assert.deepEqual(content.map((part) => part.type), ["image_url", "text"])
  assert.equal(textOf(content), "hi")
  assert.deepEqual(imagesOf([...content, { type: "image_url", image_url: { url: "https://e.org/a.png" } }]), [url])
  assert.deepEqual([textOf("plain"), imagesOf("plain"), textOf(null)], ["plain", [], ""])
  assert.equal(titleOf([{ role: "user", content }]), "hi")
})
