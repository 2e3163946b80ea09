// Server-sent events, as in the HTML standard (section 9.2.6), from a response body or any text.

/** Splits text into events. `push` returns the data of each event that is complete. */
export class EventParser {
  #rest = ""
  #data = []

  push(text) {
    this.#rest += text
    const events = []
    for (;;) {
      const end = this.#rest.search(/\r\n|\n|\r/)
      // A CR at the end may be the first half of a CRLF.
      if (end < 0 || (this.#rest[end] === "\r" && end + 1 === this.#rest.length)) return events
      const line = this.#rest.slice(0, end)
      this.#rest = this.#rest.slice(end + (this.#rest.startsWith("\r\n", end) ? 2 : 1))
      if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5))
      if (line === "" && this.#data.length) events.push(this.#data.splice(0).join("\n"))
    }
  }
}

/** Yields the JSON of each event until [DONE] or the end of the body. */
export async function* jsonEvents(body) {
  const parser = new EventParser()
  const reader = body.pipeThrough(new TextDecoderStream()).getReader()
  try {
    for (;;) {
      const { value, done } = await reader.read()
      if (done) return
      for (const data of parser.push(value)) {
        if (data === "[DONE]") return
        yield JSON.parse(data)
      }
    }
  } finally {
    reader.cancel().catch(() => {}) // the connection may have failed, which the caller hears of
  }
}
