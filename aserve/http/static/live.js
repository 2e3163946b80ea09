// The live view: what the server does now, read from /metrics and /live once a second while it is shown.

import { get } from "./api.js"
import { byId, h } from "./dom.js"
import { PageMap } from "./pages.js"
import { quantile, rate, readMetrics, total } from "./prometheus.js"
import { Timeline } from "./timeline.js"

const PERIOD_MS = 1000
const KEPT = 120 // readings: two minutes
const ms = (seconds) => (seconds === null ? null : seconds * 1000)

/** Each chart: its title, its unit, and its lines as [label, (before, after, seconds) => value or null]. */
const CHARTS = [
  ["Tokens per second", "tok/s", [
    ["generated", (before, after, s) => rate(before, after, "aserve_generation_tokens_total", s)],
    ["prefilled", (before, after, s) => rate(before, after, "aserve_prefill_tokens_total", s)],
  ]],
  ["Sequences", "", [
    ["running", (_, after) => total(after, "aserve_sequences_running")],
    ["waiting", (_, after) => total(after, "aserve_sequences_waiting")],
  ]],
  ["Steps per second", "/s", [
    ["steps", (before, after, s) => rate(before, after, "aserve_steps_launched_total", s)],
    ["retractions", (before, after, s) => rate(before, after, "aserve_retractions_total", s)],
  ]],
  ["Time to first token", "ms", [
    ["median", (before, after) => ms(quantile(before, after, "aserve_time_to_first_token_seconds", 0.5))],
    ["p90", (before, after) => ms(quantile(before, after, "aserve_time_to_first_token_seconds", 0.9))],
    ["p99", (before, after) => ms(quantile(before, after, "aserve_time_to_first_token_seconds", 0.99))],
  ]],
  ["Time between tokens", "ms", [
    ["median", (before, after) => ms(quantile(before, after, "aserve_inter_token_latency_seconds", 0.5))],
    ["p90", (before, after) => ms(quantile(before, after, "aserve_inter_token_latency_seconds", 0.9))],
    ["p99", (before, after) => ms(quantile(before, after, "aserve_inter_token_latency_seconds", 0.99))],
  ]],
  ["Event loop delay", "ms", [
    ["p99", (before, after) => ms(quantile(before, after, "aserve_event_loop_delay_seconds", 0.99))],
  ]],
]

export class LiveView {
  #before = null
  #timer = null
  #pageSize = null // tokens; known once the engine has started

  constructor() {
    this.charts = CHARTS.map(([title, unit, lines]) => new Chart(title, unit, lines))
    this.failure = h("p", { class: "failure", role: "alert", hidden: true })
    this.timeline = new Timeline()
    this.pages = new PageMap()
    byId("live").replaceChildren(this.failure, this.timeline.node, this.pages.node, ...this.charts.map((chart) => chart.node))
  }

  show() {
    this.#timer ??= setInterval(() => this.#read(), PERIOD_MS)
    this.#read()
  }

  hide() {
    clearInterval(this.#timer)
    this.#timer = null
  }

  async #read() {
    if (document.hidden) return
    try {
      const [text, recent] = await Promise.all([get("metrics"), get(`live?since=${this.timeline.since}`)])
      const metrics = readMetrics(await text.text())
      this.timeline.add(await recent.json())
      await this.#showPages(metrics)
      const now = { metrics, at: performance.now() }
      const before = this.#before
      this.#before = now
      this.failure.hidden = true
      if (before && now.at > before.at) this.#add(before, now)
    } catch (error) {
      this.failure.hidden = false
      this.failure.textContent = error.message
    }
  }

  async #showPages(metrics) {
    this.#pageSize ??= (await (await get("server_info")).json()).page_size ?? null
    const [pages, used, cached] = ["", "_used", "_cached"].map((name) => total(metrics, `aserve_kv_pages${name}`))
    if (this.#pageSize) this.pages.show(this.timeline.running, { pages, used, cached }, this.#pageSize)
  }

  #add(before, now) {
    const seconds = (now.at - before.at) / 1000
    for (const chart of this.charts) chart.add(before.metrics, now.metrics, seconds)
  }
}

const SVG = "http://www.w3.org/2000/svg"
const [WIDTH, HEIGHT] = [240, 60]

class Chart {
  constructor(title, unit, lines) {
    this.unit = unit
    this.lines = lines.map(([label, read], at) => ({
      read,
      values: [],
      now: h("b", {}, "–"),
      path: document.createElementNS(SVG, "path"),
      label,
      at,
    }))
    this.svg = document.createElementNS(SVG, "svg")
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`)
    this.svg.setAttribute("preserveAspectRatio", "none")
    this.svg.setAttribute("aria-hidden", "true")
    for (const line of this.lines) {
      line.path.setAttribute("class", `line line-${line.at}`)
      this.svg.append(line.path)
    }
    const legend = this.lines.map((line) => h("span", { class: `key key-${line.at}` }, line.now, ` ${line.label}`))
    this.node = h("figure", { class: "chart" }, h("figcaption", {}, title), this.svg, h("p", { class: "legend" }, ...legend))
  }

  add(before, after, seconds) {
    for (const line of this.lines) {
      const value = line.read(before, after, seconds)
      line.values.push(value)
      if (line.values.length > KEPT) line.values.shift()
      line.now.textContent = value === null ? "–" : `${shown(value)}${this.unit && ` ${this.unit}`}`
    }
    const most = Math.max(1e-9, ...this.lines.flatMap((line) => line.values.filter((value) => value !== null)))
    for (const line of this.lines) line.path.setAttribute("d", path(line.values, most))
  }
}

/** A gap where a value is not known. */
function path(values, most) {
  const step = WIDTH / (KEPT - 1)
  const start = WIDTH - (values.length - 1) * step
  let pen = "M"
  return values
    .map((value, at) => {
      if (value === null) {
        pen = "M"
        return ""
      }
      const point = `${pen}${(start + at * step).toFixed(1)} ${(HEIGHT - 2 - ((HEIGHT - 6) * value) / most).toFixed(1)}`
      pen = "L"
      return point
    })
    .join("")
}

const shown = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 || Number.isInteger(value) ? 0 : 1))
