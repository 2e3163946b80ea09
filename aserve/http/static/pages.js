// The KV pages of the server as a map by owner: requests, shared prefixes, the prefix cache, and free pages.

import { h, perFrame } from "./dom.js"

const MAX_CELLS = 2048
const HUES = 12
const STEP_HUES = 5 // from one request to the next, so that neighbours differ

/** The pages that belong to a running request alone, by its tokens: those of a cached prefix may be shared. */
export function ownPages(request, pageSize) {
  if (!request.admitted_s || request.ended_s || !request.prompt_tokens) return 0
  const prompt = Math.floor(request.prompt_tokens / pageSize)
  const counts = Object.values(request.completion_tokens)
  const tails = counts.map((count) => Math.ceil((request.prompt_tokens + count) / pageSize) - prompt)
  return prompt - Math.floor(request.cached_tokens / pageSize) + tails.reduce((sum, tail) => sum + tail, 0)
}

/** [{kind, name, pages}] of all pages, of which so many are used or cached. What sequences use beyond the requests' own pages is shared, or of a prompt whose tokens are not told yet. */
export function ownersOf(requests, { pages: total, used, cached }, pageSize) {
  const owners = []
  let left = used
  requests.forEach((request, at) => {
    const pages = Math.min(left, ownPages(request, pageSize))
    left -= pages
    if (pages) owners.push({ kind: "request", name: request.request_id.slice(0, 8), hue: (at * STEP_HUES) % HUES, pages })
  })
  owners.push({ kind: "shared", name: "shared or prefilling", pages: left })
  owners.push({ kind: "cached", name: "cached", pages: cached })
  owners.push({ kind: "free", name: "free", pages: Math.max(0, total - used - cached) })
  return owners
}

/** The owner of each cell of a map. A cell stands for one page or, in a large pool, for several. */
export function cellsOf(owners, maxCells = MAX_CELLS) {
  const total = owners.reduce((sum, owner) => sum + owner.pages, 0)
  const perCell = Math.max(1, Math.ceil(total / maxCells))
  const cells = []
  let pages = 0
  for (const owner of owners) {
    pages += owner.pages
    // An owner of less than a cell has one, too.
    const until = owner.pages ? Math.max(cells.length + 1, Math.round(pages / perCell)) : cells.length
    while (cells.length < until) cells.push(owner)
  }
  return { cells, perCell }
}

export class PageMap {
  #cells = []
  #owners = []
  #place = null // cells in a row, and their width

  constructor() {
    this.canvas = h("canvas", { role: "img", "aria-label": "KV pages by owner" })
    this.legend = h("p", { class: "legend" })
    this.told = h("p", { class: "hint" }, "Each square is a page, or several of a large pool. Point at one.")
    this.node = h("figure", { class: "chart wide pages" }, h("figcaption", {}, "KV pages by owner"), this.canvas, this.legend, this.told)
    this.draw = perFrame(() => this.#draw())
    this.canvas.addEventListener("pointermove", (event) => this.#point(event))
    addEventListener("resize", this.draw)
  }

  show(requests, counts, pageSize) {
    this.#owners = ownersOf(requests, counts, pageSize)
    const running = this.#owners.filter((owner) => owner.kind === "request")
    const groups = [
      ["request", `${running.length} ${running.length === 1 ? "request" : "requests"}`, running.reduce((sum, owner) => sum + owner.pages, 0)],
      ...this.#owners.filter((owner) => owner.kind !== "request").map((owner) => [owner.kind, owner.name, owner.pages]),
    ]
    this.legend.replaceChildren(...groups.map(([kind, name, pages]) => h("span", {}, h("i", { class: `swatch ${kind}` }), `${name} `, h("b", {}, pages.toLocaleString("en")))))
    this.canvas.setAttribute("aria-label", `KV pages: ${groups.map(([, name, pages]) => `${name} ${pages}`).join(", ")}`)
    this.draw()
  }

  #draw() {
    const { cells, perCell } = cellsOf(this.#owners)
    const width = this.canvas.clientWidth
    const size = Math.max(5, Math.min(16, Math.floor(Math.sqrt((width * 96) / Math.max(1, cells.length)))))
    const columns = Math.max(1, Math.floor(width / size))
    const height = Math.max(1, Math.ceil(cells.length / columns)) * size
    const scale = devicePixelRatio
    Object.assign(this.canvas, { width: width * scale, height: height * scale })
    this.canvas.style.height = `${height}px`
    const pen = this.canvas.getContext("2d")
    pen.scale(scale, scale)
    const style = getComputedStyle(document.documentElement)
    const colour = (name) => style.getPropertyValue(name).trim()
    const colours = { shared: colour("--soft"), cached: `rgba(${colour("--glow")}, .55)`, free: colour("--panel") }
    cells.forEach((owner, at) => {
      pen.fillStyle = colours[owner.kind] ?? `hsl(${(owner.hue * 360) / HUES} 45% 50%)`
      pen.fillRect((at % columns) * size, Math.floor(at / columns) * size, size - 1, size - 1)
    })
    this.#cells = cells
    this.#place = { columns, size, perCell }
  }

  #point({ offsetX, offsetY }) {
    if (!this.#place) return
    const { columns, size, perCell } = this.#place
    const owner = this.#cells[Math.floor(offsetY / size) * columns + Math.min(columns - 1, Math.floor(offsetX / size))]
    if (!owner) return
    const cell = perCell > 1 ? ` · a square stands for ${perCell} pages` : ""
    this.told.textContent = `${owner.kind === "request" ? `request ${owner.name}` : owner.name}: ${owner.pages.toLocaleString("en")} pages${cell}`
  }
}
