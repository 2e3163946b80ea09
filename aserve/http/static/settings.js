// The panel of settings: one form whose fields are those of DEFAULTS in store.js, and the API key.

import { apiKey, setApiKey } from "./api.js"
import { h } from "./dom.js"
import { DEFAULTS, loadSettings, saveSettings } from "./store.js"

const EFFORTS = ["", "none", "minimal", "low", "medium", "high"]

/** Fields by group: [name, label, kind or choices, hint]. */
const GROUPS = {
  Conversation: [
    ["model", "Model", "model", ""],
    ["system", "System message", "lines", ""],
    ["reasoning_effort", "Reasoning effort", EFFORTS, "for models that reason"],
  ],
  Sampling: [
    ["temperature", "Temperature", "number", "0 takes the likeliest token"],
    ["top_p", "Top p", "number", ""],
    ["top_k", "Top k", "number", ""],
    ["min_p", "Min p", "number", ""],
    ["max_tokens", "Most tokens", "number", ""],
    ["seed", "Seed", "number", "empty: a new one each time"],
    ["presence_penalty", "Presence penalty", "number", ""],
    ["frequency_penalty", "Frequency penalty", "number", ""],
    ["repetition_penalty", "Repetition penalty", "number", ""],
    ["stop", "Stop strings", "lines", "one per line"],
  ],
  Output: [
    ["logprobs", "Token probabilities", "switch", "shades each token; point at one for its alternatives"],
    ["schema", "JSON schema", "code", "the answer will follow it"],
    ["tools", "Tools", "code", "a JSON list, as the API takes it"],
    ["extra", "More parameters", "code", "a JSON object, added to the request"],
  ],
}

/** Builds the panel. `get()` returns the settings as they are now; `onChange` hears of changes. */
export function settingsPanel(panel, { models = [], onChange = () => {}, values = loadSettings(), save = saveSettings } = {}) {
  const settings = { ...values }
  const set = (name, value) => {
    settings[name] = value
    save(settings)
    onChange(settings)
  }
  const draw = () => {
    const groups = Object.entries(GROUPS).map(([title, fields]) =>
      h("fieldset", {}, h("legend", {}, title), ...fields.map((each) => field(each, settings, set, models))),
    )
    const key = h("input", { type: "password", value: apiKey(), autocomplete: "off", "aria-label": "API key" })
    key.addEventListener("change", () => setApiKey(key.value))
    const access = h("fieldset", {}, h("legend", {}, "Access"), h("label", {}, "API key", key), h("small", {}, "kept until this tab closes"))
    const reset = h("button", { class: "quiet small", type: "button", onclick: () => {
      Object.assign(settings, DEFAULTS)
      save(settings)
      onChange(settings)
      draw()
    } }, "Reset all")
    panel.replaceChildren(h("form", { onsubmit: (event) => event.preventDefault() }, ...groups, access, reset))
  }
  draw()
  return {
    get: () => ({ ...settings }),
    setModels(names) {
      models = names
      draw()
    },
    /** Shows what is wrong with a field, and moves there. */
    complain(name, message) {
      const input = panel.querySelector(`[name="${name}"]`)
      if (!input) return
      input.setCustomValidity(message)
      input.reportValidity()
      input.addEventListener("input", () => input.setCustomValidity(""), { once: true })
    },
  }
}

function field([name, label, kind, hint], settings, set, models) {
  const input = inputOf(name, kind, settings, models)
  const read = () => set(name, kind === "switch" ? input.checked : input.value)
  input.addEventListener("change", read)
  if (kind !== "switch") input.addEventListener("input", read)
  const note = hint ? h("small", {}, hint) : null
  const order = kind === "switch" ? [input, label] : [label, input]
  return h("div", { class: `field ${typeof kind === "string" ? kind : "choice"}` }, h("label", {}, ...order), note)
}

function inputOf(name, kind, settings, models) {
  const value = settings[name]
  if (kind === "switch") return h("input", { type: "checkbox", name, checked: Boolean(value) })
  if (kind === "lines" || kind === "code") return h("textarea", { name, rows: 2, class: kind, value: undefined }, value)
  const choices = kind === "model" ? ["", ...models] : kind
  if (Array.isArray(choices)) {
    const options = choices.map((each) => h("option", { value: each, selected: each === value }, each || "default"))
    return h("select", { name }, ...options)
  }
  return h("input", { type: "text", inputmode: "decimal", name, value, placeholder: "default", autocomplete: "off" })
}
