// Makes the body of a chat completion from the settings. Throws a SettingError that names the field.

export class SettingError extends Error {
  constructor(field, message) {
    super(message)
    this.field = field
  }
}

const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
]
export const NUM_ALTERNATIVES = 5

/** The parameters that chat completions and completions share. An empty setting is left to the server. */
export function sampling(settings) {
  const body = {}
  if (settings.model) body.model = settings.model
  for (const name of NUMBERS) {
    if (String(settings[name]).trim() === "") continue
    const value = Number(settings[name])
    if (!Number.isFinite(value)) throw new SettingError(name, `${name} is not a number: ${settings[name]}`)
    body[name] = value
  }
  const stops = settings.stop.split("\n").filter(Boolean).map(unescapeLine)
  if (stops.length) body.stop = stops
  return { ...body, ...object(settings, "extra") }
}

export function chatBody(settings, messages) {
  const body = { messages: withSystem(settings, messages), ...sampling(settings) }
  const schema = object(settings, "schema")
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } }
  const tools = parsed(settings, "tools")
  if (tools !== undefined && !Array.isArray(tools)) throw new SettingError("tools", "tools is not a JSON list")
  if (tools?.length) body.tools = tools
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES })
  return body
}

/** The body that goes on with an assistant's message that has begun. */
export function continuedBody(settings, messages, prefix) {
  return {
    ...chatBody(settings, [...messages, { role: "assistant", content: prefix }]),
    add_generation_prompt: false,
    continue_final_message: true,
  }
}

function withSystem(settings, messages) {
  const sent = messages.map(({ shown: _, ...message }) => message)
  const text = settings.system.trim()
  return text ? [{ role: "system", content: text }, ...sent] : sent
}

/** A stop string has its own line, in which \n stands for a line end. */
const unescapeLine = (line) => line.replaceAll("\\n", "\n")

function parsed(settings, field) {
  if (!settings[field].trim()) return undefined
  try {
    return JSON.parse(settings[field])
  } catch (error) {
    throw new SettingError(field, `${field} is not JSON: ${error.message}`)
  }
}

function object(settings, field) {
  const value = parsed(settings, field)
  if (value === undefined || (value && typeof value === "object" && !Array.isArray(value))) return value
  throw new SettingError(field, `${field} is not a JSON object`)
}
