// The completion view: a page of text that the model continues in place.

import { describe } from "./answer.js"
import { stream } from "./api.js"
import { byId, perFrame } from "./dom.js"
import { sampling, SettingError } from "./request.js"

export class CompleteView {
  #before = null // the text before the last continuation
  #running = null

  constructor(settings) {
    this.settings = settings
    this.area = byId("complete-text")
    this.figures = byId("complete-figures")
    byId("complete-go").addEventListener("click", () => (this.#running ? this.stop() : this.#go()))
    byId("complete-undo").addEventListener("click", () => {
      this.stop()
      this.area.value = this.#before
      byId("complete-undo").disabled = true
    })
  }

  stop() {
    this.#running?.abort()
  }

  async #go() {
    let body
    try {
      body = { prompt: this.area.value, ...sampling(this.settings.get()) }
    } catch (error) {
      if (!(error instanceof SettingError)) throw error
      this.settings.complain(error.field, error.message)
      return
    }
    this.#before = this.area.value
    const running = (this.#running = new AbortController())
    byId("complete-go").textContent = "Stop"
    byId("complete-undo").disabled = false
    try {
      await this.#stream(body, running)
    } catch (error) {
      this.figures.textContent = running.signal.aborted ? "stopped" : error.message
    }
    this.#running = null
    byId("complete-go").textContent = "Continue"
  }

  async #stream(body, running) {
    const began = performance.now()
    let [text, first, last] = ["", null, null]
    const draw = perFrame(() => {
      if (this.#running !== running) return
      this.area.value = this.#before + text
      this.area.scrollTop = this.area.scrollHeight
    })
    for await (const event of stream("v1/completions", body, running.signal)) {
      const piece = event.choices?.[0]?.text
      if (piece) {
        text += piece
        last = performance.now()
        first ??= last
      }
      if (event.usage) this.#show(event, { began, first, last })
      draw()
    }
    this.area.value = this.#before + text
  }

  #show({ usage, seed }, { began, first, last }) {
    const tokens = usage.completion_tokens
    const rate = tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null
    const figures = { ttftMs: first === null ? null : first - began, tokens, cached: 0, promptTokens: null, rate }
    this.figures.textContent = describe(figures, null, seed)
  }
}
