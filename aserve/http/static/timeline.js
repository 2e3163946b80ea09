// The requests of the last minute as bars over time, and the steps under them.

import { h, perFrame } from "./dom.js"

const SPAN_S = 60
const LANE = 11 // pixels, with the gap
const STEPS = 64 // pixels under the bars

/** The phases of a request, each from one of its times to the next that is known. */
export function phases(request, now) {
  const end = request.ended_s || now
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
    phases(request, now).map(([name, from, to]) => ({
      name, cat: "request", ph: "X", pid: 1, tid: lane + 1, ts: us(from), dur: us(to - from),
      args: { id: request.request_id, outcome: request.outcome, prompt_tokens: request.prompt_tokens, cached_tokens: request.cached_tokens, completion_tokens: outputs(request) },
    })),
  )
  const counters = steps.map((step) => ({
    name: "step", ph: "C", pid: 1, ts: us(step.at_s),
    args: { running: step.num_running, waiting: step.num_waiting, prefill_tokens: step.num_prefill_tokens, used_pages: step.used_pages },
  }))
  return { traceEvents: [...bars, ...counters] }
}

const outputs = (request) => Object.values(request.completion_tokens).reduce((sum, count) => sum + count, 0)

/** What a pointer shows over a bar. */
export function tell(request, now) {
  const spans = phases(request, now).map(([name, from, to]) => `${name} ${Math.round((to - from) * 1000)} ms`)
  const counts = `${request.prompt_tokens} prompt tokens (${request.cached_tokens} cached), ${outputs(request)} generated`
  return `${request.request_id.slice(0, 8)} · ${request.outcome || "running"} · ${spans.join(", ")} · ${counts}`
}

/** The most running rows, and the prompt tokens, of each pixel column. Without a step for half a second nothing runs. */
export function stepColumns(steps, now, x) {
  const width = Math.ceil(x(now))
  const running = Array(width).fill(0)
  const prefill = Array(width).fill(0)
  steps.forEach((step, at) => {
    const until = Math.min(steps[at + 1]?.at_s ?? now, step.at_s + 0.5)
    const from = Math.max(0, Math.floor(x(step.at_s)))
    if (from < width) prefill[from] += step.num_prefill_tokens
    for (let column = from; column < Math.min(width, Math.max(from + 1, Math.round(x(until)))); column += 1) {
      running[column] = Math.max(running[column], step.num_running)
    }
  })
  return { running, prefill }
}

export class Timeline {
  #requests = new Map()
  #steps = []
  #now = 0
  #placed = []

  constructor() {
    this.canvas = h("canvas", { role: "img", "aria-label": "Requests over the last minute" })
    this.told = h("p", { class: "hint" }, "Each bar is a request: queued, prefill, decode. Point at one.")
    const legend = ["queued", "prefill", "decode", "failed"].map((name) => h("span", {}, h("i", { class: `swatch ${name}` }), name))
    const save = h("button", { class: "quiet small", onclick: () => this.#save() }, "Save for Perfetto")
    this.node = h("figure", { class: "chart timeline" }, h("figcaption", {}, "Requests and steps of the last minute", save), this.canvas, h("p", { class: "legend" }, ...legend), this.told)
    this.draw = perFrame(() => this.#draw())
    this.canvas.addEventListener("pointermove", (event) => this.#point(event))
    addEventListener("resize", this.draw)
  }

  add({ now_s: now, requests, steps }) {
    if (now < this.#now) this.#requests.clear() // the server was started anew
    this.#now = now
    for (const request of requests) this.#requests.set(request.request_id, request)
    for (const [id, request] of this.#requests) {
      if (request.ended_s && request.ended_s < now - SPAN_S) this.#requests.delete(id)
    }
    this.#steps = [...this.#steps, ...steps].filter((step) => step.at_s > now - SPAN_S && step.at_s <= now)
    this.canvas.setAttribute("aria-label", `${this.#requests.size} requests and ${this.#steps.length} ticks in the last minute`)
    this.draw()
  }

  get since() {
    return this.#now
  }

  #draw() {
    const style = getComputedStyle(document.documentElement)
    const colour = (name) => style.getPropertyValue(name).trim()
    const placed = lanes(this.#requests.values(), this.#now)
    const rows = Math.max(6, ...placed.map(([, lane]) => lane + 1))
    const [width, height] = [this.canvas.clientWidth, rows * LANE + STEPS + 8]
    const scale = devicePixelRatio
    Object.assign(this.canvas, { width: width * scale, height: height * scale })
    this.canvas.style.height = `${height}px`
    const pen = this.canvas.getContext("2d")
    pen.scale(scale, scale)
    const x = (at) => width * (1 - (this.#now - at) / SPAN_S)
    const colours = { queued: `rgb(${colour("--glow")})`, prefill: colour("--soft"), decode: colour("--accent") }
    this.#placed = placed.map(([request, lane]) => {
      const top = lane * LANE + 2
      for (const [name, from, to] of phases(request, this.#now)) {
        pen.fillStyle = request.outcome === "failed" || request.outcome === "refused" ? colour("--danger") : colours[name]
        pen.fillRect(x(from), top, Math.max(1, x(to) - x(from)), LANE - 3)
      }
      return { request, top, from: x(request.received_s), to: x(request.ended_s || this.#now) }
    })
    this.#drawSteps(pen, x, rows * LANE + 8, colours)
  }

  /** Running rows as a filled line, the tokens of prompts as strokes over it; one column per pixel. */
  #drawSteps(pen, x, top, colours) {
    const columns = stepColumns(this.#steps, this.#now, x)
    const base = top + STEPS - 10
    const draw = (values, colour) => {
      const most = Math.max(1, ...values)
      pen.fillStyle = colour
      values.forEach((value, at) => value && pen.fillRect(at, base, 1, (-(STEPS - 12) * value) / most))
    }
    pen.globalAlpha = 0.35
    draw(columns.running, colours.decode)
    pen.globalAlpha = 1
    draw(columns.prefill, colours.queued)
  }

  #point({ offsetX, offsetY }) {
    const hit = this.#placed.find(({ top, from, to }) => offsetY >= top && offsetY < top + LANE && offsetX >= from && offsetX <= Math.max(to, from + 3))
    if (hit) this.told.textContent = tell(hit.request, this.#now)
  }

  #save() {
    const trace = traceEvents({ requests: [...this.#requests.values()], steps: this.#steps, now_s: this.#now })
    const url = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: "application/json" }))
    h("a", { href: url, download: "aserve-trace.json" }).click()
    URL.revokeObjectURL(url)
  }
}
