// Drives Debian's Chromium over /chat and /status of a running server. Arguments: a JSON object with
// url, key, modules (folder of node_modules), profile (an empty folder), shots (folder for
// screenshots, or ""), worker (pid of a worker to kill). Prints a JSON object with what was seen.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import process from "node:process";

const given = JSON.parse(process.argv[2]);
const require = createRequire(`${given.modules}/`);
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const EVIL = `<img src=x onerror="document.title='taken'"><script>document.title='taken'</script>`;
const WIDE = { width: 1280, height: 800 };
const NARROW = { width: 390, height: 800 };

const seen = { consoleErrors: [], foreign: [], violations: [] };
const browser = await chromium.launchPersistentContext(given.profile, {
  executablePath: "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync"],
  viewport: WIDE,
  bypassCSP: false,
});

function watch(page, expected = []) {
  page.on("console", (message) => {
    const isExpected = expected.some((words) => message.text().includes(words));
    if (message.type() === "error" && !isExpected) seen.consoleErrors.push(message.text());
  });
  page.on("pageerror", (error) => seen.consoleErrors.push(String(error)));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(`${given.url}/`) && !/^(blob|data):/.test(url)) seen.foreign.push(url);
  });
  return page;
}

async function open(path, expected) {
  const page = watch(await browser.newPage(), expected);
  await page.goto(`${given.url}/${path}`);
  return page;
}

async function inspect(page, where) {
  // Through the debugger: the page's own policy allows no such script.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  for (const { id, impact, nodes } of violations) {
    if (["serious", "critical"].includes(impact)) {
      seen.violations.push(`${where}: ${id}: ${nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`);
    }
  }
}

async function shoot(page, name) {
  for (const size of [WIDE, NARROW]) {
    await page.setViewportSize(size);
    await page.waitForTimeout(150);
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    if (width > size.width) seen.violations.push(`${name}: ${width} px wide on ${size.width}`);
    if (given.shots) await page.screenshot({ path: `${given.shots}/${name}-${size.width}.png` });
  }
  await page.setViewportSize(WIDE);
}

const answer = (page) => page.locator(".turn.assistant").last().locator(".text").last();

async function running() {
  const headers = { authorization: `Bearer ${given.key}` };
  const text = await (await fetch(`${given.url}/metrics`, { headers })).text();
  const lines = text.split("\n").filter((line) => line.startsWith("manta_engine_num_running{"));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").pop()), 0);
}

async function chat() {
  const page = await open("chat", ["401"]);
  // With the keyboard alone: the key, then a message.
  await page.getByLabel("API key").focus();
  await page.keyboard.type("sk-wrong");
  await page.getByLabel("Message").fill("Hello");
  await page.getByLabel("Message").press("Enter");
  await page.getByRole("alert").waitFor();
  seen.wrongKey = await page.getByRole("alert").textContent();
  await inspect(page, "chat with an error");

  await page.getByLabel("API key").fill(given.key);
  await page.getByText("Settings").click();
  await page.getByLabel("System prompt").fill("You write Python.");
  await page.getByLabel("Most tokens").fill("400");
  await page.getByLabel("Temperature").fill("0.8");
  await page.getByLabel("Seed").fill("7");
  await page.getByText("Settings").click();
  await page.getByLabel("Message").fill(`def first(x): ${EVIL}`);
  await page.evaluate(() => {
    globalThis.lengths = new Set();
    new MutationObserver(() => {
      const texts = document.querySelectorAll(".turn.assistant .text");
      if (texts.length) globalThis.lengths.add(texts[texts.length - 1].textContent.length);
    }).observe(document.body, { subtree: true, childList: true, characterData: true });
  });
  await page.getByLabel("Message").press("Enter");
  await page.getByText("Answer complete").waitFor({ state: "attached", timeout: 60_000 });
  seen.growths = await page.evaluate(() => globalThis.lengths.size);
  seen.figures = await page.locator(".turn.assistant .figures").last().textContent();
  seen.prompt = await page.locator(".turn.user .text").last().textContent();
  // The same prefix again: it is cached, and by now the router knows where.
  await page.waitForTimeout(1500);
  await page.getByLabel("Message").fill("And then?");
  await page.getByRole("button", { name: "Send" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".turn.assistant .figures").length === 2
    && !document.querySelector(".cursor"), null, { timeout: 60_000 });
  seen.secondFigures = await page.locator(".turn.assistant .figures").last().textContent();
  await inspect(page, "chat");
  await shoot(page, "chat");

  await page.getByText("Settings").click();
  await page.getByLabel("Most tokens").fill("30000");
  await page.getByLabel("Message").fill("Go on for long.");
  await page.getByLabel("Message").press("Enter");
  await page.locator(".cursor").waitFor();
  await page.waitForFunction(() => [...document.querySelectorAll(".turn.assistant .text")].pop().textContent.length > 20);
  seen.runningBeforeStop = await running();
  const stopped = Date.now();
  await page.getByRole("button", { name: "Stop" }).click();
  while ((await running()) > 0 && Date.now() - stopped < 10_000) await page.waitForTimeout(50);
  seen.idleAfterMs = Date.now() - stopped;
  seen.stopFigures = await page.locator(".turn.assistant .figures").last().textContent();

  // What a model could write.
  await page.route("**/v1/chat/completions", (route) => {
    const chunk = { choices: [{ index: 0, delta: { content: EVIL } }] };
    const body = `data: ${JSON.stringify(chunk)}\n\ndata: [DONE]\n\n`;
    return route.fulfill({ body, contentType: "text/event-stream" });
  });
  await page.getByRole("button", { name: "New conversation" }).click();
  await page.getByLabel("Message").fill("x");
  await page.getByLabel("Message").press("Enter");
  await page.locator(".turn.assistant .text").waitFor();
  await page.waitForFunction(() => !document.querySelector(".cursor"));
  seen.output = await answer(page).textContent();
  seen.images = await page.locator("#page img, #page script").count();
  seen.title = await page.title();

  // Code, and twelve tokens that come together.
  await page.unroute("**/v1/chat/completions");
  await page.route("**/v1/chat/completions", (route) => {
    const usage = { completion_tokens: 12, prompt_tokens: 3 };
    const texts = ["Call `f(x)`:\n```python\n", "f(1)\n", "```\n", "so."];
    const chunks = texts.map((content, i) => ({
      choices: [{ index: 0, delta: { content } }],
      usage: { ...usage, completion_tokens: 3 * (i + 1) },
    }));
    const body = chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("");
    return route.fulfill({ body: `${body}data: [DONE]\n\n`, contentType: "text/event-stream" });
  });
  await page.getByLabel("Message").fill("y");
  await page.getByLabel("Message").press("Enter");
  await page.waitForFunction(() => document.querySelectorAll(".turn.assistant .figures").length === 1
    && !document.querySelector(".cursor"));
  seen.code = await page.locator(".turn.assistant .text :not(pre) > code, .turn.assistant .text > code").last().textContent();
  seen.block = await page.locator(".turn.assistant .text pre code").textContent();
  seen.togetherFigures = await page.locator(".turn.assistant .figures").last().textContent();
  await inspect(page, "chat with code");
  const ground = (name) => page.getByRole("button", { name })
    .evaluate((button) => getComputedStyle(button).backgroundColor);
  seen.sendGround = await ground("Send");
  seen.newGround = await ground("New conversation");
  seen.isSendEnabled = await page.getByRole("button", { name: "Send" }).isEnabled();
  seen.hintWithKeys = await page.locator("#keys").isVisible();
  const debug = await page.context().newCDPSession(page);
  await debug.send("Emulation.setTouchEmulationEnabled", { enabled: true, maxTouchPoints: 5 });
  const phone = { width: 390, height: 800, deviceScaleFactor: 2, mobile: true };
  await debug.send("Emulation.setDeviceMetricsOverride", phone);
  seen.hintOnPhones = await page.locator("#keys").isVisible();
  await page.close();
}

async function withoutKeys() {
  const page = await open("chat");
  const fields = page.getByLabel("API key");
  await fields.waitFor();
  await page.route("**/pages/access.json", (route) => route.fulfill({ json: { keys: false } }));
  const asked = page.waitForResponse("**/pages/access.json");
  await page.reload();
  await asked;
  await page.waitForTimeout(300);
  seen.fieldsWithoutKeys = await fields.count();
  await page.close();
}

async function status() {
  const chatPage = await open("chat");
  await chatPage.getByLabel("API key").fill(given.key);
  await chatPage.getByText("Settings").click();
  await chatPage.getByLabel("Most tokens").fill("30000");
  await chatPage.getByLabel("Temperature").fill("0");
  await chatPage.getByText("Settings").click();
  const page = await open("status", ["401"]);
  await page.getByRole("alert").waitFor();
  seen.statusWithoutKey = await page.getByRole("alert").textContent();
  await page.getByLabel("API key").fill(given.key);
  await page.locator(".replica.serving").nth(1).waitFor();
  await chatPage.getByLabel("Message").fill("def go():");
  await chatPage.getByLabel("Message").press("Enter");
  await chatPage.locator(".cursor").waitFor();
  // The replica that answers: its worker is the one to kill.
  await page.locator(".replica.serving", { has: page.locator("dd", { hasText: /^1$/ }) }).first().waitFor();
  const row = page.locator(".replica", { has: page.locator("dd", { hasText: /^1$/ }) }).first();
  const place = (await row.locator("h3").textContent()).match(/\d+/)[0];
  const pid = (await row.locator(".roles li", { hasText: "worker" }).first().textContent()).match(/pid (\d+)/)[1];
  const before = (await answer(chatPage).textContent()).length;
  process.kill(Number(pid), "SIGKILL");
  const killed = Date.now();
  const mine = page.locator(".replica", { has: page.locator("h3", { hasText: `Engine ${place} ` }) });
  await page.locator(".replica.lost", { hasText: `Engine ${place} ` }).waitFor({ timeout: 15_000 });
  seen.redAfterMs = Date.now() - killed;
  seen.lostColour = await mine.evaluate((element) => getComputedStyle(element).borderLeftColor);
  seen.lostText = await mine.textContent();
  await inspect(page, "status with a lost engine");
  if (given.shots) await page.screenshot({ path: `${given.shots}/status-lost-1280.png` });
  await page.locator(".replica.serving", { hasText: `Engine ${place} ` }).waitFor({ timeout: 90_000 });
  seen.greenAfterMs = Date.now() - killed;
  seen.chatOpenWhenGreen = await chatPage.locator(".cursor").count();
  const atGreen = (await answer(chatPage).textContent()).length;
  await chatPage.waitForFunction((n) => {
    const texts = document.querySelectorAll(".turn.assistant .text");
    return texts[texts.length - 1].textContent.length > n;
  }, atGreen);
  await chatPage.bringToFront();
  await chatPage.getByLabel("Message").press("Escape");
  await chatPage.waitForFunction(() => !document.querySelector(".cursor"), null, { timeout: 10_000 });
  seen.chatGrewAfterKill = (await answer(chatPage).textContent()).length - before;
  seen.chatErrors = await chatPage.getByRole("alert").count();
  seen.chatFigures = await chatPage.locator(".turn.assistant .figures").last().textContent();

  await page.getByRole("button", { name: "Timeline" }).press("Enter");
  await page.locator(".timeline rect").first().waitFor();
  seen.timelineSpans = await page.locator(".timeline rect").count();
  seen.timelineRows = await page.locator("#timeline tbody tr").count();
  const [download] = await Promise.all([
    page.waitForEvent("download"),
    page.getByRole("button", { name: "Save for Perfetto" }).click(),
  ]);
  seen.saved = JSON.parse(readFileSync(await download.path(), "utf8")).traceEvents.length;
  await inspect(page, "status");
  await shoot(page, "status");
  await page.emulateMedia({ colorScheme: "dark" });
  await chatPage.emulateMedia({ colorScheme: "dark" });
  await inspect(page, "status, dark");
  await inspect(chatPage, "chat, dark");
}

try {
  await chat();
  await withoutKeys();
  await status();
} catch (error) {
  seen.failed = String(error.stack ?? error);
}
await browser.close();
console.log(JSON.stringify(seen));
