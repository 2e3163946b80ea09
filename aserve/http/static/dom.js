// Builds DOM nodes. Text always becomes a text node, so nothing that a model writes is read as HTML.

export const byId = (id) => document.getElementById(id)

/** h("p", {class: "hint", onclick}, "text", node): properties that begin with "on" are listeners. */
export function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value)
    else if (name in node && typeof value !== "string") node[name] = value
    else node.setAttribute(name === "htmlFor" ? "for" : name, value === true ? "" : value)
  }
  node.append(...children.filter((child) => child !== null && child !== undefined))
  return node
}

/** Lets a text area grow with its text, up to its max-height in the style sheet. */
export function autosize(area) {
  const fit = () => {
    area.style.height = "auto"
    area.style.height = `${area.scrollHeight + 2}px`
  }
  area.addEventListener("input", fit)
  return fit
}

/** Calls `draw` at most once per frame, however often the returned function is called. */
export function perFrame(draw) {
  let scheduled = false
  return () => {
    if (scheduled) return
    scheduled = true
    requestAnimationFrame(() => {
      scheduled = false
      draw()
    })
  }
}
