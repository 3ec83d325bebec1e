// Rollouts: where each stands, its guardrails, and the buttons.

import { h, card, swap, table, num, percent, empty, DASH } from "./dom.js";
import { call } from "./api.js";
import { t } from "./words.js";

const PILL = { shadow: "", running: "accent", paused: "warn", promoted: "ok", rolled_back: "err", refused: "err" };
const ACTIONS = ["promote", "pause", "resume", "rollback"];
const ALLOWED = {
  shadow: ["promote", "rollback"], running: ["promote", "pause", "rollback"], paused: ["promote", "resume", "rollback"],
  promoted: ["rollback"], rolled_back: ["resume"],
};
const VERDICT = { kept: "ok", ok: "ok", passed: "ok", broken: "err", violated: "err" };

export function create(ctx) {
  const root = h("div", { class: "grid" });
  let shown = "";
  async function act(name, action) {
    const answer = await ctx.ask({ title: t("act_ask", t(action), name), text: t("act_text"), isDanger: action === "rollback" });
    if (answer) await ctx.attempt(() => call(`admin/canary/${encodeURIComponent(name)}/${action}`, { method: "POST" }));
  }
  function one(name, r) {
    const buttons = "stage" in r ? ACTIONS.map((a) => h("button", { type: "button", class: a === "rollback" ? "danger" : null, "data-key": `${name}-${a}`, disabled: !ALLOWED[r.status]?.includes(a), onclick: () => act(name, a) }, t(a))) : [];
    const stages = "stage" in r ? h("div", { class: "stages", role: "img", "aria-label": t("stage", r.stage + 1, r.num_stages) }, Array.from({ length: r.num_stages }, (_, i) => h("i", { class: i < r.stage ? "done" : i === r.stage ? "now" : null }))) : null;
    return card(name, { note: r.why, tools: [h("span", { class: `pill ${PILL[r.status] || ""}` }, r.status), ...buttons] }, h("div", { class: "stack" }, stages,
      "stage" in r ? h("div", { class: "facts" }, h("span", {}, h("b", {}, t("stage", r.stage + 1, r.num_stages))), h("span", {}, `${t("share")} `, h("b", {}, percent(r.share))),
        Object.entries(r.num_samples || {}).map(([arm, n]) => h("span", {}, `${arm} `, h("b", {}, num(n)))),
        (r.missing || []).length ? h("span", {}, `${t("still_needed")} `, h("b", {}, r.missing.join("; "))) : null) : null,
      (r.guardrails || []).length ? h("div", { class: "scroll" }, table([{ name: t("guardrail") }, { name: t("reading"), num: true }, { name: t("limit"), num: true }, { name: t("batches"), num: true }, { name: t("verdict") }],
        r.guardrails.map((g) => h("tr", {}, h("th", { scope: "row" }, g.guardrail), h("td", { class: "num" }, g.reading === null ? DASH : num(g.reading), g.reading !== null && g.unit === "ms" ? h("span", { class: "note" }, " ms") : null),
          h("td", { class: "num" }, num(g.limit)), h("td", { class: "num" }, num(g.num_batches)), h("td", {}, h("span", { class: `pill ${VERDICT[g.verdict] || ""}` }, g.verdict)))))) : null));
  }
  function update() {
    const canary = ctx.state?.canary || {}, text = JSON.stringify(canary);
    if (text === shown) return;
    shown = text;
    const names = Object.keys(canary);
    swap(root, names.length ? names.map((name) => one(name, canary[name])) : card(t("rollouts"), {}, empty(t("no_rollouts"))));
  }
  return { root, update };
}
