// Pictures of a message, on a page whose model takes them: chosen or pasted, shown in the composer, and sent within the message.

import { byId, h } from "./dom.js"

const isImage = (url) => typeof url === "string" && /^data:image\//.test(url)

/** The content of a message as chat completions take it: a text, or parts if there are pictures. */
export function messageContent(text, urls) {
  if (!urls.length) return text
  return [...urls.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }]
}

export const textOf = (content) => (Array.isArray(content) ? content.map((part) => part.text ?? "").join("") : (content ?? ""))

/** The pictures that the page itself holds; it loads nothing from elsewhere. */
export const imagesOf = (content) => (Array.isArray(content) ? content.map((part) => part.image_url?.url).filter(isImage) : [])

export const imageNodes = (urls) => urls.map((url) => h("img", { class: "picture", src: url, alt: "picture of the message" }))

/** The pictures that the next message gets. */
export class Pictures {
  #urls = []
  #isAllowed = false

  constructor(input) {
    this.strip = byId("pictures")
    const file = byId("picture-file")
    byId("attach").addEventListener("click", () => file.click())
    file.addEventListener("change", async () => {
      await this.#add(file.files)
      file.value = ""
    })
    input.addEventListener("paste", (event) => this.#add(event.clipboardData.files))
  }

  /** Without this the page shows no way to add a picture. */
  allow(isAllowed) {
    this.#isAllowed = isAllowed
    byId("attach").hidden = !isAllowed
  }

  take() {
    const urls = this.#urls
    this.set([])
    return urls
  }

  set(urls) {
    this.#urls = urls
    const remove = (url) => h("button", { class: "quiet small", type: "button", "aria-label": "Remove the picture", onclick: () => this.set(this.#urls.filter((each) => each !== url)) }, "✕")
    this.strip.replaceChildren(...urls.map((url) => h("span", {}, ...imageNodes([url]), remove(url))))
    this.strip.hidden = !urls.length
  }

  async #add(files) {
    if (!this.#isAllowed) return
    const urls = await Promise.all([...files].map(dataUrl))
    this.set([...new Set([...this.#urls, ...urls.filter(isImage)])])
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader()
    reader.onload = () => resolve(reader.result)
    reader.onerror = () => reject(reader.error)
    reader.readAsDataURL(file)
  })
}
