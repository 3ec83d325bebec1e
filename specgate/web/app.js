// The frame: polls the server, keeps what it said, shows one page at a time.

import { h, swap, num, duration } from "./dom.js";
import { call, keys } from "./api.js";
import { setLanguage, t } from "./words.js";
import * as overview from "./overview.js";
import * as decisions from "./decisions.js";
import * as guards from "./guards.js";
import * as model from "./model.js";
import * as rollouts from "./rollouts.js";
import * as costs from "./costs.js";
import * as explain from "./explain.js";
import * as chat from "./chat.js";

const PAGES = { overview, decisions, guards, model, rollouts, costs, explain, chat };
const EVERY_MS = 2000, SLOW_MS = 10000, MAX_DECISIONS = 60, MAX_SAMPLES = { "30m": 360, "24h": 288 };
const find = (id) => document.getElementById(id);
const kept = (name, otherwise) => localStorage.getItem(`specgate.${name}`) || otherwise;
const keep = (name, value) => localStorage.setItem(`specgate.${name}`, value);

const ctx = {
  state: null, model: null, modelName: "", methods: [], events: [], decisions: [], predictions: {},
  history: { "30m": { interval_s: 5, samples: [] }, "24h": { interval_s: 300, samples: [] } }, range: "30m",
  /** The class that gives a policy its colour; always the same one for the same name. */
  color(name) {
    if (name === "baseline") return "c-baseline";
    const at = ctx.methods.indexOf(name);
    return `c-${at >= 0 ? [1, 2, 4, 5][at % 4] : 4}`; // 3 is for what is no policy
  },
  policy: (name) => h("span", { class: "policy" }, h("i", { class: `swatch ${ctx.color(name)}` }), name || "–"),
  setRange(range) { ctx.range = range; refresh(true); },
  ask, attempt, noteError,
};
let page = "overview", view = null, slowAt = 0, isPolling = false, signature = "";

// --- talking to the server -----------------------------------------------------------------

async function fetchHistory(range) {
  const kept = ctx.history[range], since = kept.samples.at(-1)?.time ?? 0;
  const got = await call(`admin/history?range=${range}&since=${since}`);
  const samples = got.samples.map((x) => ({ ...x, arrivals: Object.values(x.policies).reduce((a, b) => a + b, 0) / got.interval_s }));
  kept.interval_s = got.interval_s;
  kept.samples = [...kept.samples, ...samples].slice(-MAX_SAMPLES[range]);
}

async function poll(isForced = false) {
  const isSlowDue = isForced || Date.now() - slowAt > SLOW_MS;
  const wanted = [call("admin/state").then((x) => { ctx.state = x; })];
  if (page === "overview") wanted.push(call("admin/events?limit=200").then((x) => { ctx.events = x.events; }), fetchHistory("30m"));
  if (page === "overview" && ctx.range === "24h" && isSlowDue) wanted.push(fetchHistory("24h"));
  if (page === "decisions") {
    const since = ctx.decisions[0]?.time ?? 0;
    wanted.push(call(`admin/decisions?limit=${MAX_DECISIONS}&since=${since}`).then((x) => { ctx.decisions = [...x.decisions, ...ctx.decisions].slice(0, MAX_DECISIONS); }));
  }
  if (page === "model" && isSlowDue) wanted.push(call("admin/predictions").then((x) => { ctx.predictions = x.models; }));
  if (isSlowDue) slowAt = Date.now();
  await Promise.all(wanted);
  const names = Object.keys(ctx.state.models);
  if (!names.includes(ctx.modelName)) ctx.modelName = names[0] || "";
  ctx.model = ctx.state.models[ctx.modelName] || null;
  ctx.methods = Object.keys(ctx.model?.methods || {});
}

async function refresh(isForced = false) {
  if (isPolling) return;
  isPolling = true;
  try {
    await poll(isForced);
    banner("");
    draw();
  } catch (error) {
    noteError(error);
  } finally {
    isPolling = false;
  }
}

function noteError(error) {
  if (error.status === 401) askKeys();
  banner(error instanceof TypeError ? t("unreachable") : error.message);
}

/** Run it; what fails is shown. undefined then. */
async function attempt(action) {
  try {
    const answer = await action();
    banner("");
    refresh(true);
    return answer ?? true;
  } catch (error) {
    noteError(error);
    return undefined;
  }
}

function banner(text) {
  const element = find("banner");
  element.hidden = !text;
  if (element.textContent !== text) element.textContent = text;
}

// --- dialogs -------------------------------------------------------------------------------

/** A question. Resolves to false, or to {name: checked} of its check boxes. */
function ask({ title, text, isDanger = false, boxes = [], content = null }) {
  const dialog = find("dialog");
  if (dialog.open) return Promise.resolve(false);
  return new Promise((resolve) => {
    const inputs = boxes.map(([name, words]) => [name, h("input", { type: "checkbox" }), words]);
    const done = (answer) => { dialog.close(); resolve(answer); };
    swap(dialog, h("form", { method: "dialog", onsubmit: (e) => { e.preventDefault(); done(Object.fromEntries(inputs.map(([name, input]) => [name, input.checked]))); } },
      h("h2", { id: "dialog-title" }, title), text ? h("p", { class: "note" }, text) : null, content,
      inputs.map(([, input, words]) => h("div", { class: "row" }, h("label", { class: "row" }, words, input))),
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => done(false) }, t("cancel")),
        h("button", { type: "submit", class: isDanger ? "danger on" : "primary", id: "dialog-yes" }, t(content ? "save" : "confirm")))));
    dialog.oncancel = (event) => { event.preventDefault(); done(false); };
    dialog.showModal();
  });
}

async function askKeys() {
  const admin = h("input", { type: "password", autocomplete: "off", id: "admin-token", value: keys.admin });
  const api = h("input", { type: "password", autocomplete: "off", id: "api-key", value: keys.api });
  const answer = await ask({ title: t("keys_title"), text: t("keys_text"), content: h("div", {}, h("label", {}, t("admin_token"), admin), h("label", {}, t("api_key"), api)) });
  if (answer) { keys.set(admin.value.trim(), api.value.trim()); refresh(true); }
}

async function kill() {
  const isOn = ctx.state?.force !== null && ctx.state?.force !== undefined;
  const answer = await ask(isOn ? { title: t("lift_ask"), text: t("lift_text") }
    : { title: t("kill_ask"), text: t("kill_text"), isDanger: true, boxes: [["persist", t("kill_persist")]] });
  if (!answer) return;
  const body = isOn ? { force: null } : { force: "baseline", ...(answer.persist ? { persist: true } : {}) };
  await attempt(() => call("admin/policy", { method: "PUT", body }));
}

// --- the frame -----------------------------------------------------------------------------

function drawStatus() {
  const { state } = ctx;
  const ready = ctx.model?.ready && !state.draining;
  const names = Object.keys(state.models);
  swap(find("status"), h("span", { class: `pill ${ready ? "ok" : "err"}` }, state.draining ? t("draining") : ready ? t("ready") : `${t("not_ready")}: ${ctx.model?.detail ?? ""}`),
    names.length > 1 ? h("select", { "aria-label": t("served_model"), "data-key": "model", onchange: (e) => { ctx.modelName = e.target.value; refresh(true); } },
      names.map((n) => h("option", { value: n, selected: n === ctx.modelName }, n))) : h("span", {}, ctx.modelName),
    h("span", { class: "small" }, `${state.version}, ${t("up_for", duration(state.uptime_s))}`));
  const button = find("kill");
  const isOn = state.force !== null;
  button.className = isOn ? "danger on" : "danger";
  button.textContent = t(isOn ? "kill_on" : "kill");
  button.setAttribute("aria-pressed", String(isOn));
  const shut = (ctx.model?.guards || []).filter((d) => d.state !== "allowed").length;
  find("shut").textContent = shut ? num(shut) : "";
  find("shut").hidden = !shut;
}

function draw() {
  if (!ctx.state) return;
  drawStatus();
  const now = `${page}|${ctx.modelName}|${ctx.methods.join()}`;
  if (!view || now !== signature) { // pages are built for a model and its methods
    signature = now;
    view = PAGES[page].create(ctx);
    find("main").replaceChildren(view.root);
  }
  view.update();
}

function drawFrame() {
  const language = kept("language", navigator.language.startsWith("zh") ? "zh" : "en"), theme = kept("theme", "auto");
  setLanguage(language);
  if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  find("skip").textContent = t("skip");
  swap(find("tools"),
    h("button", { id: "kill", type: "button", class: "danger", onclick: kill }, t("kill")),
    h("button", { type: "button", id: "keys", onclick: askKeys }, t("keys")),
    h("div", { class: "segments", role: "group", "aria-label": t("language") }, [["en", "EN"], ["zh", "中文"]].map(([key, name]) =>
      h("button", { type: "button", lang: key, "data-key": `lang-${key}`, "aria-pressed": String(key === language), onclick: () => { keep("language", key); rebuild(); } }, name))),
    h("select", { "aria-label": t("theme"), id: "theme", "data-key": "theme", onchange: (e) => { keep("theme", e.target.value); rebuild(); } },
      ["auto", "light", "dark"].map((key) => h("option", { value: key, selected: key === theme }, t(`theme_${key}`)))));
  const nav = find("nav");
  nav.setAttribute("aria-label", "specgate");
  swap(nav, Object.keys(PAGES).map((name) => h("a", { href: `#/${name}`, "data-key": `nav-${name}`, "aria-current": name === page ? "page" : null },
    t(name), name === "guards" ? h("span", { class: "badge", id: "shut", hidden: true }) : null)));
}

function rebuild() {
  view = null;
  drawFrame();
  draw();
}

function go() {
  const name = location.hash.replace("#/", "");
  page = PAGES[name] ? name : "overview";
  rebuild();
  refresh(true);
}

find("skip").addEventListener("click", () => find("main").focus());
window.addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
setInterval(() => { if (!document.hidden && !find("dialog").open) refresh(); }, EVERY_MS);
go();
