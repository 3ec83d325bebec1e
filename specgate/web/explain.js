// Paste a request and see what would be decided, without running it.

import { h, card, swap } from "./dom.js";
import { call } from "./api.js";
import { beliefs, candidates } from "./decisions.js";
import { t } from "./words.js";

export function create(ctx) {
  const example = { model: ctx.modelName || "", temperature: 0, max_tokens: 128,
    messages: [{ role: "user", content: t("example") }] };
  const box = h("textarea", { class: "code", rows: "12", spellcheck: "false", id: "explain-body", "aria-label": t("explain_note"), value: ctx.explained ?? JSON.stringify(example, null, 2) });
  const result = h("div", { "aria-live": "polite", id: "explain-result", class: "stack" });
  async function run() {
    let body;
    try { body = JSON.parse(box.value); } catch (error) { swap(result, h("p", { class: "pill err" }, t("bad_json", error.message))); return; }
    const answer = await ctx.attempt(() => call("admin/explain", { method: "POST", body }));
    if (!answer) return;
    swap(result, h("div", { class: "row" }, answer.policy ? [h("strong", {}, ctx.policy(answer.policy)), h("span", { class: "note" }, t("would_be")), h("span", { class: "pill accent" }, answer.reason), h("span", { class: "pill" }, answer.task)]
      : h("span", { class: "pill err" }, t("refused_with")), answer.refused ? h("span", {}, `${answer.refused.status}: ${answer.refused.message}`) : null), beliefs(answer), candidates(answer, ctx));
  }
  box.addEventListener("input", () => { ctx.explained = box.value; });
  box.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); });
  const root = h("div", { class: "grid" }, card(t("explain_title"), { note: t("explain_note") }, h("div", { class: "stack" }, box,
    h("div", { class: "row" }, h("button", { type: "button", class: "primary", id: "explain-run", onclick: run }, t("explain_button")), h("span", { class: "note small" }, "Ctrl+Enter")), result)));
  return { root, update() {} };
}
