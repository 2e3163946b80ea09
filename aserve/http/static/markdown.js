// A part of Markdown: what models write. `parse` makes a tree of plain objects, `render` DOM nodes of it.
// Raw HTML stays text, and links lead to http, https and mailto only.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/
const QUOTE = /^ {0,3}>\s?(.*)$/
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/
const LINK = /^\[([^\]\n]{0,500})\]\((https?:\/\/[^\s()]+|mailto:[^\s()]+)\)/
const MAX_DEPTH = 8 // of quotes and lists in each other; what is deeper stays text

export function parse(text, depth = 0) {
  const lines = text.split("\n")
  const blocks = []
  let at = 0
  while (at < lines.length) {
    const [block, next] = readBlock(lines, at, depth)
    if (block) blocks.push(block)
    at = next
  }
  return blocks
}

function readBlock(lines, at, depth) {
  const line = lines[at]
  if (!line.trim()) return [null, at + 1]
  const fence = FENCE.exec(line)
  if (fence) return readCode(lines, at, fence)
  const heading = HEADING.exec(line)
  if (heading) return [{ type: "heading", level: heading[1].length, inline: inline(heading[2]) }, at + 1]
  if (RULE.test(line)) return [{ type: "rule" }, at + 1]
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth)
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth)
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) return readTable(lines, at)
  return readParagraph(lines, at)
}

/** A fence that is not closed yet, as while an answer streams, goes to the end. */
function readCode(lines, at, [, mark, language]) {
  const closes = (line) => line.trim().length >= mark.length && new RegExp(`^ {0,3}\\${mark[0]}+\\s*$`).test(line)
  let end = at + 1
  while (end < lines.length && !closes(lines[end])) end += 1
  return [{ type: "code", language, text: lines.slice(at + 1, end).join("\n") }, end + 1]
}

function readQuote(lines, at, depth) {
  const inner = []
  while (at < lines.length && QUOTE.test(lines[at])) inner.push(QUOTE.exec(lines[at++])[1])
  return [{ type: "quote", blocks: parse(inner.join("\n"), depth + 1) }, at]
}

/** Lines that are indented more than the item's mark belong to the item. */
function readList(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at])
  const ordered = /\d/.test(mark)
  const items = []
  while (at < lines.length) {
    const item = ITEM.exec(lines[at])
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== ordered) break
    const inner = [item[3]]
    at += 1
    const belongs = (line) => (line.trim() ? /^\s*/.exec(line)[0].length > indent.length : true)
    while (at < lines.length && belongs(lines[at])) inner.push(lines[at++])
    while (inner.length > 1 && !inner.at(-1).trim()) inner.pop()
    items.push(parse(dedent(inner), depth + 1))
  }
  return [{ type: "list", ordered, start: ordered ? parseInt(mark, 10) : null, items }, at]
}

function dedent([first, ...rest]) {
  const indents = rest.filter((line) => line.trim()).map((line) => /^\s*/.exec(line)[0].length)
  const least = Math.min(...indents, Infinity)
  return [first, ...rest.map((line) => line.slice(Number.isFinite(least) ? least : 0))].join("\n")
}

function readTable(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()))
  const head = cells(lines[at])
  const rows = []
  at += 2
  while (at < lines.length && lines[at].includes("|")) rows.push(cells(lines[at++]))
  return [{ type: "table", head, rows }, at]
}

function readParagraph(lines, at) {
  const start = at
  do at += 1
  while (at < lines.length && lines[at].trim() && !begins(lines, at))
  return [{ type: "paragraph", inline: inline(lines.slice(start, at).join("\n")) }, at]
}

function begins(lines, at) {
  const line = lines[at]
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line)
}

const PAIRS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "deleted"],
  ["*", "emphasis"],
  ["_", "emphasis"],
]

/** Inline parts: texts, code, links and emphasis in each other. */
export function inline(text, depth = 0) {
  const parts = []
  let plain = ""
  let at = 0
  const flush = () => {
    if (plain) parts.push({ type: "text", text: plain })
    plain = ""
  }
  while (at < text.length) {
    const [part, length] = readInline(text, at, depth)
    if (part) {
      flush()
      parts.push(part)
    } else {
      plain += text.slice(at, at + length)
    }
    at += length
  }
  flush()
  return parts
}

function readInline(text, at, depth) {
  const char = text[at]
  if (char === "\\" && /[\\`*_~[\](){}#+\-.!|>]/.test(text[at + 1] ?? "")) {
    return [{ type: "text", text: text[at + 1] }, 2]
  }
  if (char === "`") return readCodeSpan(text, at)
  if (char === "[") {
    const link = LINK.exec(text.slice(at, at + 2600))
    if (link) return [{ type: "link", href: link[2], inline: inline(link[1], depth + 1) }, link[0].length]
  }
  if ("*_~".includes(char) && depth < MAX_DEPTH) return readPair(text, at, depth)
  return [null, 1]
}

function readCodeSpan(text, at) {
  const mark = /^`+/.exec(text.slice(at))[0]
  const end = text.indexOf(mark, at + mark.length)
  if (end < 0) return [null, mark.length]
  return [{ type: "codespan", text: text.slice(at + mark.length, end) }, end + mark.length - at]
}

/** An opening mark has no blank after it, a closing one none before; `_` does not work inside words. */
function readPair(text, at, depth) {
  const [mark, type] = PAIRS.find(([each]) => text.startsWith(each, at)) ?? [text[at], null]
  const start = at + mark.length
  const isWordBefore = mark[0] === "_" && /\w/.test(text[at - 1] ?? "")
  if (!type || isWordBefore || /\s/.test(text[start] ?? " ")) return [null, mark.length]
  let end = text.indexOf(mark, start + 1)
  while (end > 0 && (/\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? "")))) {
    end = text.indexOf(mark, end + 1)
  }
  if (end < 0) return [null, mark.length]
  return [{ type, inline: inline(text.slice(start, end), depth + 1) }, end + mark.length - at]
}

const TAGS = { strong: "strong", emphasis: "em", deleted: "del", quote: "blockquote" }

export function render(blocks) {
  const fragment = document.createDocumentFragment()
  fragment.append(...blocks.map(renderBlock))
  return fragment
}

function element(tag, children = []) {
  const node = document.createElement(tag)
  node.append(...children)
  return node
}

function renderBlock(block) {
  switch (block.type) {
    case "heading":
      return element(`h${Math.min(block.level + 2, 6)}`, block.inline.map(renderInline))
    case "rule":
      return element("hr")
    case "code":
      return renderCode(block)
    case "quote":
      return element(TAGS.quote, [render(block.blocks)])
    case "list":
      return renderList(block)
    case "table":
      return renderTable(block)
    default:
      return element("p", block.inline.map(renderInline))
  }
}

function renderCode({ language, text }) {
  const copy = element("button", ["Copy"])
  copy.className = "quiet small"
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text)
    copy.textContent = "Copied"
  })
  const head = element("figcaption", [language || "text", copy])
  return element("figure", [head, element("pre", [element("code", [text])])])
}

function renderList({ ordered, start, items }) {
  const list = element(ordered ? "ol" : "ul", items.map((blocks) => element("li", [renderItem(blocks)])))
  if (ordered && start !== 1) list.start = start
  return list
}

/** The only paragraph of an item needs no paragraph. */
function renderItem(blocks) {
  if (blocks[0]?.type !== "paragraph") return render(blocks)
  const fragment = document.createDocumentFragment()
  fragment.append(...blocks[0].inline.map(renderInline), render(blocks.slice(1)))
  return fragment
}

function renderTable({ head, rows }) {
  const row = (cells, tag) => element("tr", cells.map((cell) => element(tag, cell.map(renderInline))))
  const body = element("tbody", rows.map((cells) => row(cells, "td")))
  return element("table", [element("thead", [row(head, "th")]), body])
}

function renderInline(part) {
  if (part.type === "text") return document.createTextNode(part.text)
  if (part.type === "codespan") return element("code", [part.text])
  const node = element(part.type === "link" ? "a" : TAGS[part.type], part.inline.map(renderInline))
  if (part.type === "link") Object.assign(node, { href: part.href, rel: "noopener noreferrer", target: "_blank" })
  return node
}
