// Shows one message of a conversation: text as Markdown, reasoning, tool calls, tokens, and figures.

import { describe } from "./answer.js"
import { byId, h } from "./dom.js"
import { parse, render } from "./markdown.js"

const HOVER_MS = 250

/** The article of a message. `actions` are [label, handler] pairs. */
export function messageView(role, actions = []) {
  const body = h("div", { class: "body" })
  const figures = h("span", { class: "figures" })
  const buttons = actions.map(([label, onclick]) => h("button", { class: "quiet small", onclick }, label))
  const foot = h("footer", {}, figures, h("span", { class: "actions" }, ...buttons))
  const node = h("article", { class: `message ${role}`, "aria-label": role }, body, foot)
  return { node, body, figures }
}

/** Draws an answer, finished or not. `onToken(index, element)` is called when a token is chosen. */
export function drawAnswer({ body, figures }, answer, { isRunning = false, onToken = null } = {}) {
  const parts = []
  if (answer.reasoning) parts.push(reasoningView(answer, body.querySelector("details"), isRunning))
  if (onToken && answer.tokens.length) parts.push(tokensView(answer, onToken))
  else if (answer.content) parts.push(h("div", { class: "text" }, render(parse(answer.content))))
  parts.push(...answer.toolCalls.filter(Boolean).map(toolCallView))
  if (isRunning) parts.push(h("span", { class: "caret", "aria-hidden": "true" }))
  body.replaceChildren(...parts)
  figures.textContent = describe(answer.figures, answer.finishReason, answer.seed)
}

/** Open while the model thinks, and afterwards as the reader left it. */
function reasoningView(answer, before, isRunning) {
  const isThinking = isRunning && !answer.content && !answer.toolCalls.length
  const details = h("details", { class: "reasoning" }, h("summary", {}, isThinking ? "Thinking" : "Thoughts"), h("p", {}, answer.reasoning))
  details.open = isThinking || Boolean(before?.open && before.dataset.chosen)
  details.querySelector("summary").addEventListener("click", () => (details.dataset.chosen = "1"))
  if (before?.dataset.chosen) details.dataset.chosen = "1"
  return details
}

function toolCallView({ name, arguments: text }) {
  let shown = text
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2)
  } catch {
    // It is still coming, or was cut: shown as it is.
  }
  return h("figure", { class: "call" }, h("figcaption", {}, `calls ${name}`), h("pre", {}, h("code", {}, shown)))
}

/** Tokens as buttons, shaded by how unlikely each was: full colour at 1 in 100 or less. */
function tokensView({ tokens, content }, onToken) {
  const view = h("div", { class: "text tokens" })
  let length = 0
  tokens.forEach((token, index) => {
    length += token.text.length
    const surprise = Math.min(1, -token.logprob / Math.log(100))
    const isEnd = length > content.length // a token that ends the answer is not in its text
    const node = h("button", { class: isEnd ? "token end" : "token", title: percent(token.logprob) }, token.text)
    node.style.setProperty("--surprise", surprise.toFixed(3))
    node.addEventListener("click", () => onToken(index, node))
    onHover(node, () => onToken(index, node, { isHover: true }))
    view.append(node)
  })
  return view
}

/** Calls `show` when a mouse rests on a node, and hides what it showed when the mouse rests elsewhere. */
function onHover(node, show) {
  let timer = null
  node.addEventListener("pointerenter", ({ pointerType }) => {
    if (pointerType === "mouse") timer = setTimeout(show, HOVER_MS)
  })
  node.addEventListener("pointerleave", () => {
    clearTimeout(timer)
    timer = setTimeout(() => {
      const popover = byId("popover")
      if (popover.dataset.hover && !popover.matches(":hover") && !node.matches(":hover")) popover.hidden = true
    }, HOVER_MS)
  })
}

export function percent(logprob) {
  const value = 100 * Math.exp(logprob)
  if (value < 0.01) return "< 0.01 %"
  return value >= 10 ? `${value.toFixed(0)} %` : `${value.toPrecision(2)} %`
}

/** The alternatives of a token beside it. Choosing one calls `onChoose(alternative)`. A popover that a mouse opened takes no focus. */
export function showAlternatives(popover, anchor, token, { isHover, onChoose }) {
  const rows = token.top.map((each) =>
    h(
      "button",
      { class: "alternative", "aria-current": each.text === token.text ? "true" : undefined, onclick: () => {
        popover.hidden = true
        onChoose(each)
      } },
      h("code", {}, JSON.stringify(each.text).slice(1, -1)),
      h("meter", { min: 0, max: 1, value: Math.exp(each.logprob) }),
      h("span", {}, percent(each.logprob)),
    ),
  )
  popover.replaceChildren(h("p", { class: "hint" }, "Choose another token, and the answer goes on from there."), ...rows)
  popover.hidden = false
  popover.dataset.hover = isHover ? "1" : ""
  const box = anchor.getBoundingClientRect()
  const left = Math.min(box.left, innerWidth - popover.offsetWidth - 8)
  const below = box.bottom + 6 + popover.offsetHeight < innerHeight
  popover.style.left = `${Math.max(8, left)}px`
  popover.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - popover.offsetHeight - 6)}px`
  if (!isHover) rows[0]?.focus()
}
