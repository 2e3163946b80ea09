// The comparison: one message, two settings, and the same seed, side by side.

import { Answer } from "./answer.js"
import { stream } from "./api.js"
import { byId, h, perFrame } from "./dom.js"
import { drawAnswer, messageView } from "./message.js"
import { chatBody, SettingError } from "./request.js"

/** What the two sides may differ in; all else comes from the settings. */
const FIELDS = ["model", "system", "temperature", "top_p", "top_k", "max_tokens", "reasoning_effort"]
const SHOWN = { model: "Model", system: "System message", temperature: "Temperature", top_p: "Top p", top_k: "Top k", max_tokens: "Most tokens", reasoning_effort: "Reasoning effort" }

export class CompareView {
  #running = null

  constructor(settings) {
    this.settings = settings
    this.sides = ["A", "B"].map((name) => new Side(name))
    byId("compare-pair").replaceChildren(...this.sides.map((side) => side.node))
    byId("compare-form").addEventListener("submit", (event) => {
      event.preventDefault()
      if (this.#running) this.stop()
      else this.#run()
    })
  }

  stop() {
    this.#running?.abort()
  }

  async #run() {
    const text = byId("compare-input").value.trim()
    if (!text) return
    const base = this.settings.get()
    const seed = base.seed.trim() || String(Math.floor(Math.random() * 2 ** 32))
    let bodies
    try {
      bodies = this.sides.map((side) => chatBody({ ...base, ...side.changed, seed }, [{ role: "user", content: text }]))
    } catch (error) {
      if (!(error instanceof SettingError)) throw error
      this.settings.complain(error.field, error.message)
      return
    }
    this.#running = new AbortController()
    byId("compare-go").textContent = "Stop"
    const { signal } = this.#running
    await Promise.all(this.sides.map((side, at) => side.run(bodies[at], signal)))
    this.#running = null
    byId("compare-go").textContent = "Run both"
  }
}

class Side {
  constructor(name) {
    this.inputs = FIELDS.map((field) => [field, h("input", { type: "text", placeholder: "as in the settings", "aria-label": `${SHOWN[field]} of ${name}` })])
    const rows = this.inputs.map(([field, input]) => h("label", {}, SHOWN[field], input))
    this.place = h("div", { class: "messages" })
    this.inputs.find(([field]) => field === "temperature")[1].value = name === "A" ? "0" : "1"
    this.summary = h("summary")
    this.name = name
    this.#summarise()
    const details = h("details", { oninput: () => this.#summarise() }, this.summary, ...rows)
    this.node = h("section", { class: "side", "aria-label": `Side ${name}` }, details, this.place)
  }

  #summarise() {
    const changed = Object.entries(this.changed).map(([field, value]) => `${SHOWN[field].toLowerCase()} ${value}`)
    this.summary.textContent = `${this.name}: ${changed.join(", ") || "as in the settings"}`
  }

  get changed() {
    return Object.fromEntries(this.inputs.filter(([, input]) => input.value.trim()).map(([field, input]) => [field, input.value.trim()]))
  }

  async run(body, signal) {
    const answer = new Answer()
    const view = messageView("assistant")
    this.place.replaceChildren(view.node)
    let isRunning = true
    const draw = perFrame(() => drawAnswer(view, answer, { isRunning }))
    try {
      for await (const event of stream("v1/chat/completions", body, signal)) {
        answer.add(event)
        draw()
      }
    } catch (error) {
      this.place.append(h("p", { class: "failure", role: "alert" }, signal.aborted ? "stopped" : error.message))
    }
    isRunning = false
    drawAnswer(view, answer)
  }
}
