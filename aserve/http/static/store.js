// The chats and settings of this browser, in localStorage. Nothing of them is kept on the server.

import { textOf } from "./pictures.js"

const CHATS = "aserve.chats"
const SETTINGS = "aserve.settings"

export const DEFAULTS = {
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "512",
  seed: "",
  stop: "",
  presence_penalty: "",
  frequency_penalty: "",
  repetition_penalty: "",
  reasoning_effort: "",
  schema: "",
  tools: "",
  extra: "",
  logprobs: false,
}

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback
  } catch {
    return fallback // written by another version, or by hand
  }
}

export const loadSettings = () => ({ ...DEFAULTS, ...read(SETTINGS, {}) })
export const saveSettings = (settings) => localStorage.setItem(SETTINGS, JSON.stringify(settings))

/** A chat is {id, title, messages}; a message is what the API takes, and `shown` what the page knows of it. */
export class Chats {
  #chats

  constructor() {
    const chats = read(CHATS, [])
    this.#chats = Array.isArray(chats) ? chats.filter(isChat) : []
  }

  get all() {
    return this.#chats
  }

  add(messages = [], title = "") {
    const chat = { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title, messages }
    this.#chats.unshift(chat)
    return chat
  }

  remove(chat) {
    this.#chats = this.#chats.filter((each) => each !== chat)
    this.save()
  }

  /** Returns null, or what to tell the user. The oldest chats go first where the browser has no room. */
  save() {
    let dropped = 0
    for (;;) {
      try {
        localStorage.setItem(CHATS, JSON.stringify(this.#chats))
        return dropped ? `The browser's storage is full: the ${dropped} oldest chats were removed.` : null
      } catch {
        if (this.#chats.length < 2) return "The browser's storage is full: this chat is not kept."
        this.#chats.pop()
        dropped += 1
      }
    }
  }

  exported() {
    return JSON.stringify({ aserve_chats: 1, chats: this.#chats }, null, 1)
  }

  /** Adds the chats of an exported file. Throws if it is none. */
  import(text) {
    const { chats } = JSON.parse(text)
    if (!Array.isArray(chats) || !chats.every(isChat)) throw new Error("this file has no chats of aserve")
    for (const { messages, title } of chats.reverse()) this.add(messages, title)
    return chats.length
  }
}

function isChat(value) {
  return Boolean(value) && Array.isArray(value.messages) && value.messages.every((each) => typeof each?.role === "string")
}

/** The first words of the first message. */
export function titleOf(messages) {
  const text = textOf(messages.find((message) => message.role === "user")?.content)
  const words = text.trim().replace(/\s+/g, " ")
  return words.length > 48 ? `${words.slice(0, 47)}…` : words || "New chat"
}
