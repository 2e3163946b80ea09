// One assistant's message while it streams: its text, reasoning, tool calls, tokens and times.

/** Collects the events of one streamed chat completion. */
export class Answer {
  content = ""
  reasoning = ""
  toolCalls = []
  tokens = [] // {text, bytes, logprob, top: [{text, bytes, logprob}]}, if logprobs were asked for
  finishReason = null
  usage = null
  seed = null
  #began
  #first = null
  #last = null

  constructor(now = () => performance.now()) {
    this.now = now
    this.#began = now()
  }

  add(event) {
    if (event.usage) this.usage = event.usage
    if (event.seed !== undefined && event.seed !== null) this.seed = event.seed
    for (const choice of event.choices ?? []) this.#addChoice(choice)
  }

  #addChoice({ delta = {}, logprobs, finish_reason: reason }) {
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? ""
    if (delta.content || reasoning || delta.tool_calls) {
      this.#last = this.now()
      this.#first ??= this.#last
    }
    this.content += delta.content ?? ""
    this.reasoning += reasoning
    for (const call of delta.tool_calls ?? []) this.#addCall(call)
    for (const entry of logprobs?.content ?? []) {
      this.tokens.push(readToken(entry))
    }
    this.finishReason = reason ?? this.finishReason
  }

  #addCall({ index, id, function: called = {} }) {
    const call = (this.toolCalls[index] ??= { id: "", name: "", arguments: "" })
    call.id = id ?? call.id
    call.name += called.name ?? ""
    call.arguments += called.arguments ?? ""
  }

  /** Times in ms and tokens per second; null where they are not known. */
  get figures() {
    const tokens = this.usage?.completion_tokens ?? null
    const decodeMs = this.#first === null ? null : this.#last - this.#first
    return {
      ttftMs: this.#first === null ? null : this.#first - this.#began,
      tokens,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? 0,
      promptTokens: this.usage?.prompt_tokens ?? null,
      rate: tokens > 1 && decodeMs > 0 ? ((tokens - 1) * 1000) / decodeMs : null,
    }
  }

  /** The message as the next request sends it back. */
  get message() {
    const message = { role: "assistant", content: this.content }
    if (this.reasoning) message.reasoning_content = this.reasoning
    const calls = this.toolCalls.filter(Boolean)
    if (calls.length) {
      message.tool_calls = calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }))
    }
    return message
  }
}

/** "12 tokens, 340 tok/s, first after 8 ms, 96 of 120 prompt tokens cached" */
export function describe({ ttftMs, tokens, cached, promptTokens, rate }, finishReason, seed) {
  const parts = []
  if (tokens !== null) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`)
  if (rate !== null) parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tok/s`)
  if (ttftMs !== null) parts.push(`first after ${ttftMs < 10 ? ttftMs.toFixed(1) : Math.round(ttftMs)} ms`)
  if (cached) parts.push(`${cached} of ${promptTokens} prompt tokens cached`)
  if (finishReason && finishReason !== "stop") parts.push(finishReason.replace("_", " "))
  if (seed !== null && seed !== undefined) parts.push(`seed ${seed}`)
  return parts.join(" · ")
}

function readToken({ token, bytes, logprob, top_logprobs: top = [] }) {
  return { text: token, bytes: bytes ?? [...new TextEncoder().encode(token)], logprob, top: top.map(readToken) }
}

/** The text before token `index`, and another token in its place: where a fork goes on.
 *
 * Bytes are joined before they are decoded, because a character may lie in several tokens. */
export function forkAt(tokens, index, replacement) {
  const bytes = [...tokens.slice(0, index), replacement].flatMap((token) => token.bytes)
  return new TextDecoder().decode(new Uint8Array(bytes))
}
