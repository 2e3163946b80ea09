// Lists the operations of openapi.json, and sends requests to them.

const at = (id) => document.getElementById(id)

function element(name, fields = {}, ...children) {
  const made = Object.assign(document.createElement(name), fields)
  made.append(...children)
  return made
}

// The type of a schema in a few words; `schemas` are the document's components.
function typeWords(schema, schemas) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop()
    const target = schemas[name]
    return target && target.type === "object" ? name : typeWords(target ?? {}, schemas)
  }
  if (schema.anyOf) return schema.anyOf.map((each) => typeWords(each, schemas)).join(" | ")
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ")
  if (schema.type === "array") return `[${typeWords(schema.items ?? {}, schemas)}]`
  return schema.type ?? "any"
}

function fieldTable(schema, schemas) {
  const record = schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema
  const required = new Set(record.required ?? [])
  const rows = Object.entries(record.properties ?? {}).map(([name, field]) =>
    element("tr", {},
      element("td", {}, element("code", { textContent: name }), required.has(name) ? " *" : ""),
      element("td", { textContent: typeWords(field, schemas) })))
  const table = element("table", {}, ...rows)
  return element("details", {}, element("summary", { textContent: `${rows.length} fields` }), table)
}

async function send(method, path, body, output) {
  const headers = {}
  if (body !== undefined) headers["Content-Type"] = "application/json"
  if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`
  output.textContent = "…"
  try {
    const answer = await fetch("." + path, { method, headers, body })
    output.textContent = `${answer.status} ${answer.statusText}\n`
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      output.append(read.value)
    }
  } catch (error) {
    output.append(String(error))
  }
}

function operationView(path, method, operation, schemas) {
  const output = element("pre", { hidden: true })
  const inputs = new Map((operation.parameters ?? []).map(({ name }) =>
    [name, element("input", { placeholder: name, ariaLabel: name })]))
  const media = operation.requestBody?.content["application/json"]
  const body = media && element("textarea", {
    value: JSON.stringify(media.example, null, 2), ariaLabel: "Body", spellcheck: false,
  })
  const button = element("button", { textContent: "Send" })
  button.onclick = () => {
    output.hidden = false
    const target = path.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(inputs.get(name).value))
    send(method.toUpperCase(), target, body?.value, output)
  }
  const parts = [...inputs.values()]
  if (media) parts.push(fieldTable(media.schema, schemas), body)
  return element("details", {},
    element("summary", {},
      element("span", { className: "method", textContent: method.toUpperCase() }),
      element("code", { textContent: path }),
      element("span", { className: "words", textContent: operation.summary })),
    element("div", {}, element("p", { textContent: operation.description ?? "" }), ...parts, button, output))
}

async function show() {
  const api = await (await fetch("openapi.json")).json()
  const groups = new Map()
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0]
      if (!groups.has(tag)) groups.set(tag, [])
      groups.get(tag).push(operationView(path, method, operation, api.components.schemas))
    }
  }
  at("operations").replaceChildren(...[...groups].flatMap(([tag, views]) =>
    [element("h2", { textContent: tag }), ...views]))
}

show().catch((error) => { at("operations").textContent = String(error) })
