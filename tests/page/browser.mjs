// The page in headless Chromium, against a server with the bundled model. `make test-page` runs it:
// node browser.mjs URL [FOLDER for screenshots]. CHROMIUM names the browser's file.

import assert from "node:assert/strict"
import { chromium } from "playwright-core"

const [url, pictures] = process.argv.slice(2)
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
})
const complaints = []

async function open({ width = 1400, height = 900, colorScheme = "light" } = {}) {
  const page = await (await browser.newContext({ viewport: { width, height }, colorScheme })).newPage()
  page.setDefaultTimeout(20_000)
  page.on("console", (message) => message.type() === "error" && complaints.push(`${message.text()} ${message.location().url}`))
  page.on("pageerror", (error) => complaints.push(String(error)))
  page.on("request", (request) => request.url().startsWith(url) || request.url().startsWith("blob:") || complaints.push(`asked ${request.url()}`))
  await page.goto(url)
  await page.locator("#health-dot[data-status=ready]").waitFor()
  return page
}

async function ask(page, text) {
  await page.fill("#input", text)
  await page.press("#input", "Enter")
  await settled(page)
}

/** A picture of what is shown, at three widths and in both schemes. */
async function shoot(page, name) {
  for (const [width, colorScheme] of [[360, "light"], [1280, "light"], [1280, "dark"], [2560, "dark"]]) {
    await page.setViewportSize({ width, height: width === 360 ? 740 : 900 })
    await page.emulateMedia({ colorScheme })
    await page.waitForTimeout(1200) // the next reading
    await page.screenshot({ path: `${pictures}/page-${name}-${width}-${colorScheme}.png` })
  }
}

const settled = (page) => page.waitForFunction(() => document.querySelector("#send").textContent === "Send" && !document.querySelector(".caret"))
const last = (page) => page.locator(".message.assistant").last()

const steps = {
  async "a question is answered, with its thoughts folded and its figures"() {
    const page = await open()
    await page.fill("[name=temperature]", "0")
    await ask(page, "What is 27 plus 15?")
    assert.match(await last(page).locator(".text").innerText(), /\b42\b/)
    assert.equal(await last(page).locator("details.reasoning").count(), 1)
    assert.equal(await last(page).locator("details.reasoning").getAttribute("open"), null)
    assert.match(await last(page).locator(".figures").innerText(), /\d+ tokens · [\d.]+ tok\/s · first after [\d.]+ ms/)
    await page.reload()
    assert.match(await last(page).locator(".text").innerText(), /\b42\b/, "chats outlive a reload")
    assert.equal(await page.locator("[name=temperature]").inputValue(), "0")
    if (pictures) await shoot(page, "chat")
  },
  async "a message is edited, an answer regenerated, a new chat begun and deleted"() {
    const page = await open()
    await page.fill("[name=temperature]", "0")
    await ask(page, "What is 27 plus 15?")
    await page.locator(".message.user button", { hasText: "Edit" }).click()
    assert.equal(await page.inputValue("#input"), "What is 27 plus 15?")
    await ask(page, "What is 12 plus 30?")
    assert.equal(await page.locator(".message.user").count(), 1)
    const before = await last(page).locator(".text").innerText()
    await last(page).locator("button", { hasText: "Regenerate" }).click()
    await settled(page)
    assert.equal(await last(page).locator(".text").innerText(), before, "greedy answers repeat")
    await page.click("#new-chat")
    assert.equal(await page.locator(".message").count(), 0)
    assert.equal(await page.locator("#chat-list li").count(), 2)
    await page.locator("#chat-list li button[aria-label^=Delete]").last().click()
    assert.equal(await page.locator("#chat-list li").count(), 1)
  },
  async "Shift+Enter makes a line, Escape stops"() {
    const page = await open()
    await page.fill("#input", "Tell me a story")
    await page.press("#input", "Shift+Enter")
    assert.equal(await page.inputValue("#input"), "Tell me a story\n")
    await page.fill("[name=extra]", '{"min_tokens": 900, "max_tokens": 900}')
    await page.press("#input", "Enter")
    await page.locator(".caret").waitFor()
    await page.keyboard.press("Escape")
    await settled(page)
    assert.match(await last(page).innerText(), /stopped/)
  },
  async "tokens show their probabilities, and an alternative forks the answer"() {
    const page = await open()
    await page.fill("[name=temperature]", "0")
    await page.check("[name=logprobs]")
    await ask(page, "Tell me a story about a rabbit.")
    const before = await last(page).locator(".text").innerText()
    await last(page).locator(".token").nth(3).hover()
    await page.locator("#popover:not([hidden])").waitFor()
    await page.mouse.move(5, 5)
    await page.locator("#popover[hidden]").waitFor({ state: "attached" })
    await last(page).locator(".token").nth(8).click()
    const alternatives = page.locator("#popover .alternative")
    assert.equal(await alternatives.count(), 5)
    assert.match(await alternatives.first().innerText(), / %/)
    if (pictures) await page.screenshot({ path: `${pictures}/page-tokens.png` })
    const prefix = await last(page).locator(".token").evaluateAll((nodes) => nodes.slice(0, 8).map((node) => node.textContent).join(""))
    await alternatives.nth(1).click()
    await settled(page)
    const after = await last(page).locator(".text").innerText()
    assert.ok(after.startsWith(prefix) && after !== before && after.length > prefix.length + 20, after)
  },
  async "a schema constrains the answer, and a wrong setting is named"() {
    const page = await open()
    await page.fill("[name=schema]", '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"], "additionalProperties": false}')
    await ask(page, "Return JSON for Sam.")
    assert.deepEqual(Object.keys(JSON.parse(await last(page).locator(".text").innerText())), ["n"])
    await page.fill("[name=schema]", "{")
    await page.fill("#input", "again")
    await page.press("#input", "Enter")
    assert.match(await page.locator("[name=schema]").evaluate((node) => node.validationMessage), /schema is not JSON/)
  },
  async "a tool is called, and its result answered"() {
    const page = await open()
    await page.fill("[name=tools]", '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]')
    await page.fill("[name=extra]", '{"tool_choice": "required", "temperature": 0}')
    await ask(page, "What is the weather in Paris?")
    assert.match(await last(page).locator(".call").innerText(), /calls get_weather[\s\S]*"city"/)
    await page.fill("[name=extra]", "")
    await page.fill(".results textarea", "rain, 12 degrees")
    await page.click(".results button")
    await settled(page)
    assert.equal(await page.locator(".message.tool").count(), 1)
    assert.ok((await last(page).locator(".text").innerText()).length > 3)
  },
  async "a text is continued in place and undone"() {
    const page = await open({ colorScheme: "dark" })
    await page.click("#tab-complete")
    const before = await page.inputValue("#complete-text")
    await page.click("#complete-go")
    await page.waitForFunction(() => document.querySelector("#complete-go").textContent === "Continue" && document.querySelector("#complete-figures").textContent)
    const after = await page.inputValue("#complete-text")
    assert.ok(after.startsWith(before) && after.length > before.length)
    await page.click("#complete-undo")
    assert.equal(await page.inputValue("#complete-text"), before)
  },
  async "two settings run side by side with one seed"() {
    const page = await open({ colorScheme: "dark" })
    await page.click("#tab-compare")
    await page.fill("#compare-input", "Tell me a story about a fox.")
    await page.click("#compare-go")
    await page.waitForFunction(() => document.querySelectorAll(".side .figures").length === 2 && document.querySelector("#compare-go").textContent === "Run both")
    const [a, b] = await page.locator(".side .figures").allInnerTexts()
    assert.equal(/seed \d+/.exec(a)[0], /seed \d+/.exec(b)[0])
    const [textA, textB] = await page.locator(".side .text").allInnerTexts()
    assert.notEqual(textA, textB)
    if (pictures) await page.screenshot({ path: `${pictures}/page-compare.png` })
  },
  async "the live view follows a load"() {
    const page = await open()
    await page.click("#tab-live")
    const seen = []
    await page.exposeFunction("tellPages", (label) => seen.push(label))
    await page.evaluate(() => new MutationObserver(([{ target }]) => window.tellPages(target.ariaLabel)).observe(document.querySelector(".pages canvas"), { attributeFilter: ["aria-label"] }))
    // The browser has six connections to a server, and the view needs some.
    const load = page.evaluate(() => {
      const complete = (body) => fetch("v1/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ prompt: "Once", max_tokens: 900, ...body }) })
      const long = { prompt: "One day ".repeat(500), max_tokens: 8 } // several chunks
      return Promise.all([complete({ n: 2, ignore_eos: true }), complete({ n: 2, ignore_eos: true }), complete(long), complete({ guided_regex: "[a-z ]{200,400}" })])
    })
    await page.waitForFunction(() => Number(document.querySelector(".chart .key b").textContent.replace(/\D/g, "")) > 0)
    if (pictures) await shoot(page, "live")
    await load
    const { requests } = await page.evaluate(async () => (await fetch("live")).json())
    const states = requests.flatMap((request) => request.spans.map(([state]) => state))
    for (const state of ["tokenize", "grammar_compile", "prefill", "decode", "flush"]) assert.ok(states.includes(state), state)
    assert.ok(requests.some((request) => request.spans.filter(([state, , chunks]) => state === "prefill" && chunks).length > 1), "a prompt in chunks")
    assert.match(await page.locator(".timeline canvas").getAttribute("aria-label"), /^[1-9]\d* requests and [1-9]\d* ticks/)
    const told = await page.evaluate(() => {
      const canvas = document.querySelector(".timeline canvas")
      const { left, top, width } = canvas.getBoundingClientRect()
      const seen = new Set()
      for (let x = 0; x < width; x += 1) {
        for (const y of [5, 16, 27, 38]) {
          canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: left + x, clientY: top + y }))
          seen.add(document.querySelector(".timeline > .hint").textContent)
        }
      }
      return [...seen].join("\n")
    })
    assert.match(told, /prefill \d+ ms in \d+ chunks/)
    await page.waitForFunction(() => /requests? 0, .*free [1-9]/.test(document.querySelector(".pages canvas").ariaLabel))
    assert.ok(seen.some((label) => /[1-4] requests? [1-9]/.test(label)), seen.join("\n"))
  },
  async "a model that takes pictures gets them, and another one shows no way to add any"() {
    const page = await open()
    assert.equal(await page.locator("#attach").isVisible(), false)
    await page.route("**/model_info", (route) => route.fulfill({ json: { has_image_understanding: true } }))
    let sent = null
    await page.route("**/v1/chat/completions", (route) => {
      sent = route.request().postDataJSON().messages
      return route.fulfill({ contentType: "text/event-stream", body: 'data: {"choices": [{"index": 0, "delta": {"content": "a dot"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n' })
    })
    await page.reload()
    await page.locator("#attach").waitFor()
    const dot = Buffer.from("R0lGODlhAQABAIAAAP8AAP///ywAAAAAAQABAAACAkQBADs=", "base64")
    await page.setInputFiles("#picture-file", { name: "dot.gif", mimeType: "image/gif", buffer: dot })
    await page.locator("#pictures img").waitFor()
    await ask(page, "What is this?")
    assert.deepEqual(sent[0].content.map((part) => part.type), ["image_url", "text"])
    assert.equal(sent[0].content[0].image_url.url, `data:image/gif;base64,${dot.toString("base64")}`)
    assert.equal(await page.locator(".message.user img.picture").count(), 1)
    assert.equal(await page.locator("#pictures").isVisible(), false)
  },
  async "every view fits from 360 to 2560 pixels, in both schemes, and works by keyboard"() {
    for (const [width, colorScheme] of [[360, "dark"], [768, "light"], [2560, "dark"]]) {
      const page = await open({ width, height: 700, colorScheme })
      await page.focus("#tab-chat")
      for (const view of ["chat", "complete", "compare", "live"]) {
        assert.equal(await page.locator(`#view-${view}`).isVisible(), true)
        assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${view} at ${width}`)
        await page.keyboard.press("ArrowRight")
      }
      const paper = await page.evaluate(() => getComputedStyle(document.body).backgroundColor)
      assert.equal(parseInt(/\d+/.exec(paper)[0], 10) < 100, colorScheme === "dark")
      await page.context().close()
    }
  },
}

let failed = 0
for (const [name, step] of Object.entries(steps)) {
  try {
    await step()
    console.log(`passed  ${name}`)
  } catch (error) {
    failed += 1
    console.log(`FAILED  ${name}\n${error.stack}`)
  }
}
await browser.close()
if (complaints.length) console.log(`the browser complained:\n${complaints.join("\n")}`)
console.log(`${Object.keys(steps).length - failed} passed, ${failed} failed`)
process.exit(failed || complaints.length ? 1 : 0)
