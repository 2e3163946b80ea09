// The requests of the last minute as bars over time, and under them the rows of the steps and how busy device and host were.

import { h, perFrame } from "./dom.js"

const SPAN_S = 60
const LANE = 11 // pixels, with the gap
const ROWS = 56 // pixels of the rows of steps, under the bars
const BUSY = 40 // pixels of the share of time in which device and host worked, under those
const GAP = 14

/** How the states that the server records are drawn (see aserve/observability/latency.py). All others are a wait in the queue. */
const KINDS = {
  prefill: "prefill", decode: "decode", flush: "decode", retracted: "retracted",
  grammar: "grammar", grammar_compile: "grammar", queue_masks: "grammar",
}

/** The phases of a request as [kind, from, to, state, chunks]. While a page watches, the server records each state and prefill
 * chunk of the requests that arrive. Of all others three times are known. */
export function phases(request, now) {
  const end = request.ended_s || now
  const spans = (request.spans ?? []).map(([state, from, chunks], at, all) => [
    KINDS[state] ?? "queued", from, Math.min(end, all[at + 1]?.[1] ?? end), state, chunks,
  ])
  return spans.length ? spans.filter(([, from, to]) => to > from) : roughPhases(request, end)
}

function roughPhases(request, end) {
  const admitted = request.admitted_s || end
  const first = request.first_token_s || end
  const spans = [
    ["queued", request.received_s, Math.min(admitted, end)],
    ["prefill", admitted, Math.min(first, end)],
    ["decode", first, end],
  ]
  return spans.filter(([, from, to]) => to > from)
}

/** Puts each request into the first lane that is free at its start. */
export function lanes(requests, now) {
  const ends = []
  return [...requests]
    .sort((a, b) => a.received_s - b.received_s)
    .map((request) => {
      const free = ends.findIndex((end) => end <= request.received_s)
      const lane = free < 0 ? ends.length : free
      ends[lane] = request.ended_s || now
      return [request, lane]
    })
}

/** The trace event format that Perfetto and chrome://tracing read; times in microseconds. */
export function traceEvents({ requests, steps, now_s: now }) {
  const us = (seconds) => Math.round(seconds * 1e6)
  const bars = lanes(requests, now).flatMap(([request, lane]) =>
    phases(request, now).map(([name, from, to, state]) => ({
      name: state ?? name, cat: "request", ph: "X", pid: 1, tid: lane + 1, ts: us(from), dur: us(to - from),
      args: { id: request.request_id, outcome: request.outcome, prompt_tokens: request.prompt_tokens, cached_tokens: request.cached_tokens, completion_tokens: outputs(request) },
    })),
  )
  const counters = steps.map((step) => ({
    name: "step", ph: "C", pid: 1, ts: us(step.at_s),
    args: {
      running: step.num_running, waiting: step.num_waiting, decode_rows: step.num_decode_rows, prefill_rows: step.num_prefill_rows,
      prefill_tokens: step.num_prefill_tokens, used_pages: step.used_pages, device_ms: step.device_ms, host_ms: step.host_ms,
    },
  }))
  return { traceEvents: [...bars, ...counters] }
}

const outputs = (request) => Object.values(request.completion_tokens).reduce((sum, count) => sum + count, 0)

/** What a pointer shows over a bar. */
export function tell(request, now) {
  const times = new Map()
  for (const [name, from, to, state, chunks] of phases(request, now)) {
    const label = (state ?? name).replaceAll("_", " ")
    const before = times.get(label) ?? { seconds: 0, chunks: 0 }
    times.set(label, { seconds: before.seconds + to - from, chunks: before.chunks + (chunks ?? 0) })
  }
  const spans = [...times].map(([label, { seconds, chunks }]) => {
    const inChunks = chunks > 1 ? ` in ${chunks} chunks` : ""
    return `${label} ${Math.round(seconds * 1000)} ms${inChunks}`
  })
  const again = Math.max(0, request.num_admissions - request.num_sequences)
  if (again) spans.push(`retracted ${again === 1 ? "once" : `${again} times`}`)
  const counts = `${request.prompt_tokens} prompt tokens (${request.cached_tokens} cached), ${outputs(request)} generated`
  return `${request.request_id.slice(0, 8)} · ${request.outcome || "running"} · ${spans.join(", ")} · ${counts}`
}

/** What a pointer shows over the steps: the batch that a tick launched, and its times. */
export function tellStep(step) {
  const prefill = step.num_prefill_rows ? `, ${step.num_prefill_rows} prefill rows with ${step.num_prefill_tokens} tokens` : ""
  const times = `device ${step.device_ms.toFixed(1)} ms, host ${step.host_ms.toFixed(1)} ms`
  return `step ${step.iteration} · ${step.num_decode_rows} decode rows${prefill} · ${times} · ${step.num_running} running, ${step.num_waiting} waiting`
}

/** For each pixel column the most rows of a step, and the share of its time in which device and host worked.
 *
 * A step holds its rows until the next one, or for half a second; its times lie before the tick that tells them. */
export function stepColumns(steps, now, x) {
  const width = Math.ceil(x(now))
  const columns = Object.fromEntries(["decode", "prefill", "device", "host"].map((name) => [name, Array(width).fill(0)]))
  steps.forEach((step, at) => {
    const until = Math.min(steps[at + 1]?.at_s ?? now, step.at_s + 0.5)
    const from = Math.max(0, Math.floor(x(step.at_s)))
    for (let column = from; column < Math.min(width, Math.max(from + 1, Math.round(x(until)))); column += 1) {
      columns.decode[column] = Math.max(columns.decode[column], step.num_decode_rows)
      columns.prefill[column] = Math.max(columns.prefill[column], step.num_prefill_rows)
    }
    spread(columns.device, x(step.at_s - step.device_ms / 1000), x(step.at_s))
    spread(columns.host, x(step.at_s - step.host_ms / 1000), x(step.at_s))
  })
  return columns
}

/** Adds to each column how much of it lies between two places. */
function spread(columns, from, to) {
  for (let column = Math.max(0, Math.floor(from)); column < Math.min(columns.length, to); column += 1) {
    columns[column] = Math.min(1, columns[column] + Math.min(to, column + 1) - Math.max(from, column))
  }
}

const LEGEND = {
  queued: "queued", prefill: "prefill, by chunks", decode: "decode", grammar: "held by grammar", retracted: "retracted",
  failed: "failed", device: "device", host: "host",
}

export class Timeline {
  #requests = new Map()
  #steps = []
  #now = 0
  #placed = []
  #stepsTop = 0
  #secondsAt = () => 0

  constructor() {
    this.canvas = h("canvas", { role: "img", "aria-label": "Requests over the last minute" })
    this.told = h("p", { class: "hint" }, "Each bar is a request. Below are the rows of the steps, and how busy the device and the scheduler's host were. Point at something.")
    const legend = Object.entries(LEGEND).map(([name, label]) => h("span", {}, h("i", { class: `swatch ${name}` }), label))
    const save = h("button", { class: "quiet small", onclick: () => this.#save() }, "Save for Perfetto")
    this.node = h("figure", { class: "chart timeline" }, h("figcaption", {}, "Requests and steps of the last minute", save), this.canvas, h("p", { class: "legend" }, ...legend), this.told)
    this.draw = perFrame(() => this.#draw())
    this.canvas.addEventListener("pointermove", (event) => this.#point(event))
    addEventListener("resize", this.draw)
  }

  add({ now_s: now, requests, steps }) {
    if (now < this.#now) {
      this.#requests.clear() // the server was started anew
      this.#steps = []
    }
    this.#now = now
    for (const request of requests) this.#requests.set(request.request_id, request)
    for (const [id, request] of this.#requests) {
      if (request.ended_s && request.ended_s < now - SPAN_S) this.#requests.delete(id)
    }
    const known = this.#steps.at(-1)?.at_s ?? 0
    const fresh = steps.filter((step) => step.at_s > known)
    this.#steps = [...this.#steps, ...fresh].filter((step) => step.at_s > now - SPAN_S)
    this.canvas.setAttribute("aria-label", `${this.#requests.size} requests and ${this.#steps.length} ticks in the last minute`)
    this.draw()
  }

  get running() {
    return [...this.#requests.values()].filter((request) => !request.ended_s)
  }

  get since() {
    return this.#now
  }

  #draw() {
    const style = getComputedStyle(document.documentElement)
    const colour = (name) => style.getPropertyValue(name).trim()
    const placed = lanes(this.#requests.values(), this.#now)
    const rows = Math.max(6, ...placed.map(([, lane]) => lane + 1))
    const [width, height] = [this.canvas.clientWidth, rows * LANE + ROWS + BUSY + 2 * GAP]
    const scale = devicePixelRatio
    Object.assign(this.canvas, { width: width * scale, height: height * scale })
    this.canvas.style.height = `${height}px`
    const pen = this.canvas.getContext("2d")
    pen.scale(scale, scale)
    const x = (at) => width * (1 - (this.#now - at) / SPAN_S)
    const colours = {
      queued: `rgb(${colour("--glow")})`, prefill: colour("--prefill"), decode: colour("--accent"),
      grammar: colour("--held"), retracted: colour("--lost"), line: colour("--line"), host: colour("--ink"), text: colour("--soft"),
    }
    this.#stepsTop = rows * LANE + GAP / 2
    this.#secondsAt = (px) => this.#now - SPAN_S * (1 - px / width)
    this.#placed = placed.map(([request, lane]) => {
      const top = lane * LANE + 2
      const hasFailed = request.outcome === "failed" || request.outcome === "refused"
      phases(request, this.#now).forEach(([name, from, to, , chunks], at) => {
        const gap = at && chunks ? 1 : 0 // shows where a chunk begins
        pen.fillStyle = hasFailed ? colour("--danger") : colours[name]
        pen.fillRect(x(from) + gap, top, Math.max(1, x(to) - x(from) - gap), LANE - 3)
      })
      return { request, top, from: x(request.received_s), to: x(request.ended_s || this.#now) }
    })
    this.#drawSteps(pen, x, colours)
  }

  /** Decode rows with the prefill rows on them, and below the busy shares of the device, as an area, and of the host, as a line. */
  #drawSteps(pen, x, colours) {
    const { decode, prefill, device, host } = stepColumns(this.#steps, this.#now, x)
    const base = this.#stepsTop + ROWS
    const most = Math.max(1, ...decode.map((rows, at) => rows + prefill[at]))
    const scale = (ROWS - 4) / most
    const bars = (values, colour, bottom) => {
      pen.fillStyle = colour
      values.forEach((value, at) => value && pen.fillRect(at, bottom(at), 1, -value))
    }
    bars(decode.map((rows) => rows * scale), colours.decode, () => base)
    bars(prefill.map((rows) => rows * scale), colours.prefill, (at) => base - decode[at] * scale)
    const floor = base + GAP + BUSY
    pen.fillStyle = colours.line
    pen.fillRect(0, base, this.canvas.clientWidth, 1)
    pen.fillRect(0, floor, this.canvas.clientWidth, 1)
    pen.globalAlpha = 0.45
    bars(device.map((share) => share * BUSY), colours.decode, () => floor)
    pen.globalAlpha = 1
    bars(host.map((share) => share * BUSY), colours.host, () => floor)
    pen.fillStyle = colours.text
    pen.font = "11px system-ui"
    pen.fillText(`rows of a step, most ${most}`, 4, this.#stepsTop + 10)
    pen.fillText("busy: device and host, of the time", 4, base + GAP + 8)
  }

  #point({ offsetX, offsetY }) {
    const hit = this.#placed.find(({ top, from, to }) => offsetY >= top && offsetY < top + LANE && offsetX >= from && offsetX <= Math.max(to, from + 3))
    const at = this.#secondsAt(offsetX)
    const step = offsetY > this.#stepsTop && this.#steps.findLast((each) => each.at_s <= at && each.at_s > at - 0.5)
    if (hit) this.told.textContent = tell(hit.request, this.#now)
    else if (step) this.told.textContent = tellStep(step)
  }

  #save() {
    const trace = traceEvents({ requests: [...this.#requests.values()], steps: this.#steps, now_s: this.#now })
    const url = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: "application/json" }))
    h("a", { href: url, download: "aserve-trace.json" }).click()
    URL.revokeObjectURL(url)
  }
}
