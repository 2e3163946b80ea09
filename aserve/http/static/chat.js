// The chat view: the list of chats, the conversation, and the composer.

import { Answer, forkAt } from "./answer.js"
import { stream } from "./api.js"
import { autosize, byId, h, perFrame } from "./dom.js"
import { drawAnswer, messageView, showAlternatives } from "./message.js"
import { parse, render } from "./markdown.js"
import { imageNodes, imagesOf, messageContent, Pictures, textOf } from "./pictures.js"
import { chatBody, continuedBody, SettingError } from "./request.js"
import { Chats, titleOf } from "./store.js"

export class ChatView {
  #chats = new Chats()
  #chat
  #running = null // the AbortController of the answer that streams

  constructor(settings) {
    this.settings = settings
    this.list = byId("chat-list")
    this.messages = byId("messages")
    this.input = byId("input")
    this.fit = autosize(this.input)
    this.pictures = new Pictures(this.input)
    this.#chat = this.#chats.all[0] ?? this.#chats.add()
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault()
      if (this.#running) this.stop()
      else this.#submit()
    })
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return
      event.preventDefault()
      if (!this.#running) this.#submit()
    })
    byId("new-chat").addEventListener("click", () => this.#open(this.#blank()))
    this.#setUpFiles()
    this.draw()
  }

  stop() {
    this.#running?.abort()
  }

  /** A chat without messages: there is at most one. */
  #blank() {
    return this.#chats.all.find((chat) => !chat.messages.length) ?? this.#chats.add()
  }

  #open(chat) {
    this.stop()
    this.#chat = chat
    this.draw()
    this.input.focus()
  }

  #setUpFiles() {
    const file = byId("import-file")
    byId("export-chats").addEventListener("click", () => {
      const url = URL.createObjectURL(new Blob([this.#chats.exported()], { type: "application/json" }))
      h("a", { href: url, download: "aserve-chats.json" }).click()
      URL.revokeObjectURL(url)
    })
    byId("import-chats").addEventListener("click", () => file.click())
    file.addEventListener("change", async () => {
      try {
        this.#chats.import(await file.files[0].text())
        this.#save()
      } catch (error) {
        this.#tell(error.message)
      }
      file.value = ""
      this.draw()
    })
  }

  #save() {
    this.#chat.title = titleOf(this.#chat.messages)
    const told = this.#chats.save()
    if (told) this.#tell(told)
    this.#drawList()
  }

  draw() {
    this.#drawList()
    this.messages.replaceChildren(...this.#chat.messages.map((message, index) => this.#messageNode(message, index)))
    if (!this.#chat.messages.length) this.messages.append(this.#welcome())
    this.#waitForTools()
    this.messages.scrollTop = this.messages.scrollHeight
  }

  #drawList() {
    const rows = this.#chats.all.map((chat) => {
      const open = h("button", { class: "open", "aria-current": chat === this.#chat ? "true" : undefined, onclick: () => this.#open(chat) }, chat.title || "New chat")
      const remove = h("button", { class: "quiet small", "aria-label": `Delete ${chat.title || "chat"}`, onclick: () => {
        this.#chats.remove(chat)
        this.#open(chat === this.#chat ? (this.#chats.all[0] ?? this.#chats.add()) : this.#chat)
      } }, "✕")
      return h("li", {}, open, remove)
    })
    this.list.replaceChildren(...rows)
  }

  #welcome() {
    const examples = ["What is 27 plus 15?", "Return JSON for Sam.", "Tell me a story about a rabbit."]
    const buttons = examples.map((text) => h("button", { class: "quiet", onclick: () => this.send(text) }, text))
    return h("div", { class: "welcome" }, h("p", {}, "Ask the model something. Chats stay in this browser."), ...buttons)
  }

  #messageNode(message, index) {
    if (message.role === "assistant") return this.#answerNode(message, index)
    const view = messageView(message.role, message.role === "user" ? [["Edit", () => this.#edit(index)]] : [])
    if (message.role === "tool") view.body.append(h("p", { class: "hint" }, "result of the tool"), h("pre", {}, message.content))
    else view.body.append(h("div", { class: "text" }, render(parse(textOf(message.content)))), ...imageNodes(imagesOf(message.content)))
    return view.node
  }

  #answerNode(message, index) {
    const view = messageView("assistant", [
      ["Copy", () => navigator.clipboard.writeText(message.content)],
      ["Regenerate", () => this.#answer(index)],
    ])
    this.#drawStored(view, message, index)
    return view.node
  }

  #drawStored(view, message, index) {
    const shown = message.shown ?? {}
    const answer = {
      content: message.content ?? "",
      reasoning: message.reasoning_content ?? "",
      toolCalls: (message.tool_calls ?? []).map((call) => call.function),
      tokens: shown.tokens ?? [],
      figures: shown.figures ?? { ttftMs: null, tokens: null, cached: 0, promptTokens: null, rate: null },
      finishReason: shown.finishReason ?? null,
      seed: shown.seed ?? null,
    }
    // NOTE: a fork continues plain text; in reasoning and tool calls there are tokens that text cannot express.
    const isPlain = !answer.reasoning && !answer.toolCalls.length
    const onToken = isPlain && answer.tokens.length ? (at, node, { isHover = false } = {}) => this.#offer(index, answer.tokens, at, { node, isHover }) : null
    drawAnswer(view, answer, { onToken })
    if (shown.failure) view.body.append(h("p", { class: "failure", role: "alert" }, shown.failure))
  }

  #offer(index, tokens, at, { node, isHover }) {
    const onChoose = (chosen) => this.#answer(index, forkAt(tokens, at, chosen), tokens.slice(0, at).concat({ ...chosen, top: tokens[at].top }))
    showAlternatives(byId("popover"), node, tokens[at], { isHover, onChoose })
  }

  #edit(index) {
    const { content } = this.#chat.messages[index]
    this.input.value = textOf(content)
    this.pictures.set(imagesOf(content))
    this.fit()
    this.#cut(index)
    this.input.focus()
  }

  #cut(index) {
    this.stop()
    this.#chat.messages.length = index
    this.#save()
    this.draw()
  }

  #submit() {
    const text = this.input.value.trim()
    if (!text) return
    this.input.value = ""
    this.fit()
    this.send(messageContent(text, this.pictures.take()))
  }

  send(content) {
    this.#chat.messages.push({ role: "user", content })
    this.#answer(this.#chat.messages.length)
  }

  /** Writes the message at `index` anew; what came after it goes. With a prefix the message begins with it. */
  async #answer(index, prefix = "", prefixTokens = []) {
    this.stop()
    const chat = this.#chat
    const before = chat.messages.slice(0, index)
    let body
    try {
      const settings = this.settings.get()
      body = prefix ? continuedBody(settings, before, prefix) : chatBody(settings, before)
    } catch (error) {
      if (!(error instanceof SettingError)) throw error
      this.settings.complain(error.field, error.message)
      return
    }
    chat.messages.length = index
    const answer = new Answer()
    answer.content = prefix
    answer.tokens = [...prefixTokens]
    const failure = await this.#stream(body, answer, chat)
    const { figures, finishReason, seed, tokens } = answer
    chat.messages.push({ ...answer.message, shown: { figures, finishReason, seed, tokens, failure } })
    this.#save()
    if (chat === this.#chat) this.draw()
  }

  /** Streams into a view at the end of the conversation. Returns what went wrong, or null. */
  async #stream(body, answer, chat) {
    this.draw()
    const view = messageView("assistant")
    this.messages.append(view.node)
    const draw = perFrame(() => {
      const { scrollTop, clientHeight, scrollHeight } = this.messages
      if (!view.node.isConnected) return
      drawAnswer(view, answer, { isRunning: true })
      if (scrollTop + clientHeight > scrollHeight - 80) this.messages.scrollTop = this.messages.scrollHeight
    })
    draw()
    this.messages.scrollTop = this.messages.scrollHeight
    const running = (this.#running = new AbortController())
    this.#showRunning()
    try {
      for await (const event of stream("v1/chat/completions", body, running.signal)) {
        answer.add(event)
        if (chat === this.#chat) draw()
      }
      return null
    } catch (error) {
      return running.signal.aborted ? "stopped" : error.message
    } finally {
      if (this.#running === running) this.#running = null
      this.#showRunning()
    }
  }

  #showRunning() {
    byId("send").textContent = this.#running ? "Stop" : "Send"
    byId("send").classList.toggle("stop", Boolean(this.#running))
  }

  /** After tool calls the user plays the tools: a field for each result. */
  #waitForTools() {
    const last = this.#chat.messages.at(-1)
    if (last?.role !== "assistant" || !last.tool_calls?.length) return
    const fields = last.tool_calls.map((call) => [call, h("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}` })])
    const form = h("form", { class: "results", onsubmit: (event) => {
      event.preventDefault()
      for (const [call, field] of fields) {
        this.#chat.messages.push({ role: "tool", tool_call_id: call.id, content: field.value })
      }
      this.#answer(this.#chat.messages.length)
    } }, ...fields.map(([call, field]) => h("label", {}, `Result of ${call.function.name}`, field)), h("button", {}, "Send results"))
    this.messages.append(form)
  }

  #tell(text) {
    this.messages.append(h("p", { class: "failure", role: "alert" }, text))
  }
}
