// Requests to the server that this page came from.

import { jsonEvents } from "./sse.js"

const KEY = "aserve.key" // in sessionStorage: it is gone when the tab closes

export class ApiError extends Error {
  constructor(status, message) {
    super(message)
    this.status = status
  }
}

export const apiKey = () => sessionStorage.getItem(KEY) ?? ""
export const setApiKey = (key) => sessionStorage.setItem(KEY, key)

function headers() {
  const key = apiKey()
  return key ? { Authorization: `Bearer ${key}` } : {}
}

async function checked(response) {
  if (response.ok) return response
  let message = `the server answered ${response.status} ${response.statusText}`
  try {
    message = (await response.json()).error.message
  } catch {
    // Not the server's own JSON: a proxy's page, say. The status says enough.
  }
  if (response.status === 401) message += " Enter a key under Settings."
  throw new ApiError(response.status, message)
}

export const get = async (path) => checked(await fetch(path, { headers: headers() }))

export async function post(path, body) {
  const sent = { ...headers(), "Content-Type": "application/json" }
  return (await checked(await fetch(path, { method: "POST", headers: sent, body: JSON.stringify(body) }))).json()
}

/** Posts a streaming request and yields its events. An error within the stream is thrown. */
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  })
  await checked(response)
  for await (const event of jsonEvents(response.body)) {
    if (event.error) throw new ApiError(500, event.error.message)
    yield event
  }
}
