// Starts the page: the tabs, the panels, the server's health, and the four views.

import { get } from "./api.js"
import { ChatView } from "./chat.js"
import { CompareView } from "./compare.js"
import { CompleteView } from "./complete.js"
import { byId } from "./dom.js"
import { LiveView } from "./live.js"
import { settingsPanel } from "./settings.js"

const HEALTH_MS = 5000

const settings = settingsPanel(byId("settings"))
const live = new LiveView()
const chat = new ChatView(settings)
const views = {
  chat,
  complete: new CompleteView(settings),
  compare: new CompareView(settings),
  live,
}

function select(name) {
  for (const each of Object.keys(views)) {
    const tab = byId(`tab-${each}`)
    tab.setAttribute("aria-selected", String(each === name))
    tab.tabIndex = each === name ? 0 : -1
    byId(`view-${each}`).hidden = each !== name
  }
  document.body.dataset.view = name
  if (name === "live") live.show()
  else live.hide()
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`)
}

const names = Object.keys(views)
names.forEach((name, at) => {
  const tab = byId(`tab-${name}`)
  tab.addEventListener("click", () => select(name))
  tab.addEventListener("keydown", ({ key }) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key]
    if (!step) return
    const next = names[(at + step + names.length) % names.length]
    select(next)
    byId(`tab-${next}`).focus()
  })
})
select(names.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat")

function drawer(button, panel, isOpen) {
  const show = (open) => {
    panel.hidden = !open
    button.setAttribute("aria-expanded", String(open))
  }
  show(isOpen)
  button.addEventListener("click", () => show(panel.hidden))
  return show
}

const isWide = matchMedia("(min-width: 900px)")
const showChats = drawer(byId("show-chats"), byId("chats"), isWide.matches)
const showSettings = drawer(byId("show-settings"), byId("settings"), matchMedia("(min-width: 1280px)").matches)
isWide.addEventListener("change", () => {
  showChats(isWide.matches)
  if (!isWide.matches) showSettings(false)
})
byId("chat-list").addEventListener("click", () => isWide.matches || showChats(false))

addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return
  if (byId("popover").hidden) for (const view of Object.values(views)) view.stop?.()
  byId("popover").hidden = true
})
addEventListener("pointerdown", (event) => {
  if (!byId("popover").contains(event.target)) byId("popover").hidden = true
})
byId("popover").addEventListener("pointerleave", ({ currentTarget: popover }) => {
  if (popover.dataset.hover) popover.hidden = true
})

/** The model's name beside a dot; while the server starts, what it does. */
async function watchHealth() {
  const [dot, text] = [byId("health-dot"), byId("health-text")]
  try {
    const { status, reason } = await (await fetch("health")).json()
    dot.dataset.status = status
    if (status === "ready" && !watchHealth.model) watchHealth.model = await readModels()
    text.textContent = status === "ready" ? (watchHealth.model ?? "ready") : `${status}: ${reason}`
  } catch {
    dot.dataset.status = "gone"
    text.textContent = "the server does not answer"
  }
}

async function readModels() {
  try {
    const models = (await (await get("v1/models")).json()).data.map((model) => model.id)
    settings.setModels(models)
    chat.pictures.allow(Boolean((await (await get("model_info")).json()).has_image_understanding))
    return models[0]
  } catch (error) {
    return error.message // a key is missing, say; asked again with the next reading
  }
}

watchHealth()
setInterval(watchHealth, HEALTH_MS)
