// The latency model: equation with live coefficients, predicted against measured, acceptance by task.

import { h, card, swap, table, num, percent, seconds, empty, DASH } from "./dom.js";
import { scatter } from "./charts.js";
import { t } from "./words.js";

const DECODE = [["c0", ""], ["c_lead", ""], ["c_seq", "u_seq"], ["c_tok", "u_tok"], ["c_tok_above", "u_above"], ["c_kv", "u_kv"], ["c_win", "u_win"], ["c_sample", "u_sample"]];
const PREFILL = [["p0", ""], ["p_tok", "u_ptok"], ["p_dec", "u_other"], ["p_kv", "u_kv"]];
const DRAFT = [["d0", "u_call"], ["d_lead", ""], ["d_seq", "u_seq"], ["d_tok", "u_tok"], ["d_kv", "u_kv"], ["d_fill", "u_fill"]];

function equation(name, terms, coefficients, prefix = "") {
  const parts = terms.map(([key, unit]) => [coefficients[prefix + key], unit, key]).filter(([c, , key]) => c && (c.value !== 0 || key === "c0"))
    .filter(([c, , key]) => key !== "c_tok_above" || c.value !== coefficients.c_tok?.value);
  if (!parts.length) return null;
  return h("div", { class: "equation" }, h("span", { class: "name" }, `${name} =`), parts.map(([c, unit, key], i) => [
    i ? " + " : "", h("span", { class: "term", title: `${prefix}${key}: ${c.unit}` }, h("b", {}, seconds(c.value)), unit ? h("span", { class: "times" }, ` × ${t(unit)}`) : null)]));
}

function heat(ctx, acceptance) {
  const methods = ctx.methods, tasks = [...new Set(acceptance.map((a) => a.task))].sort();
  if (!tasks.length) return empty(t("no_data"));
  return h("div", { class: "scroll" }, h("table", { class: "heat" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("task")), methods.map((m) => h("th", { scope: "col" }, ctx.policy(m))))),
    h("tbody", {}, tasks.map((task) => h("tr", {}, h("th", { scope: "row" }, task), methods.map((method) => {
      const found = acceptance.find((a) => a.task === task && a.policy === method);
      if (!found) return h("td", { class: "dim" }, DASH);
      const p50 = found.p50;
      return h("td", { background: p50 === null ? null : `rgb(var(--heat) / ${(8 + 62 * p50).toFixed(0)}%)` },
        p50 === null ? t("too_few") : percent(p50), h("small", {}, t("n_requests", num(found.num_requests))));
    }))))));
}

export function create(ctx) {
  const root = h("div", { class: "grid" });
  function fit(model) {
    const rows = Object.entries(model.by_policy || {}).map(([kind, score]) => h("tr", {}, h("th", { scope: "row" }, kind), h("td", { class: "num" }, num(score.num)),
      h("td", { class: "num" }, score.r2 === null ? DASH : score.r2.toFixed(3)), h("td", { class: "num" }, percent(score.mape)), h("td", { class: "num" }, percent(score.bias)), h("td", { class: "num" }, percent(score.repeat_mape))));
    return rows.length ? table([{ name: t("kind") }, { name: t("scored"), num: true }, { name: "R²", num: true }, { name: "MAPE", num: true }, { name: t("bias"), num: true }, { name: t("noise"), num: true }], rows) : empty(t("no_data"));
  }
  function yields(model) {
    const policies = Object.entries(model.derived?.policies || {});
    if (!policies.length) return empty(t("no_data"));
    return table([{ name: t("policy") }, { name: t("speedup_now"), num: true }, { name: t("per_step"), num: true }, { name: t("load_free"), num: true }, { name: t("capacity"), num: true }],
      policies.map(([name, p]) => h("tr", {}, h("th", { scope: "row" }, ctx.policy(name)), h("td", { class: "num" }, p.speedup_now === undefined ? DASH : p.speedup_now === null ? DASH : `${p.speedup_now.toFixed(2)}×`),
        h("td", { class: "num" }, num(p.expected_tokens_per_step)), h("td", { class: "num" }, seconds(p.C1_s)), h("td", { class: "num" }, num(p.lam_max_per_s)))));
  }
  function update() {
    const state = ctx.model;
    if (!state) return;
    const model = state.latency_model, c = model.coefficients || {};
    const pairs = ctx.predictions[ctx.modelName] || {};
    const groups = Object.entries(pairs).filter(([, p]) => p.length).map(([name, p]) => ({ name, pairs: p, color: name === "prefill" ? "c-3" : ctx.color(name) }));
    const drawing = groups.length ? scatter({ groups, label: t("scatter"), xName: t("predicted_ms"), yName: t("measured_ms") }) : null;
    swap(root,
      card(t("equation"), { note: t("equation_note", num(model.num_steps)) }, Object.keys(c).length ? [
        equation(t("decode_step"), DECODE, c), equation(t("prefill_step"), PREFILL, c), ctx.methods.map((m) => equation(t("drafting", m), DRAFT, c, `${m}.`))] : empty(t("no_data"))),
      card(t("scatter"), { size: "half", note: t("scatter_note") }, drawing || empty(t("no_data")),
        h("div", { class: "legend" }, groups.map((g) => h("span", { class: "policy" }, h("i", { class: `swatch ${g.color}` }), g.name)))),
      h("div", { class: "half stack" }, card(t("yields"), { flush: true }, yields(model)), card(t("fit"), { flush: true }, fit(model))),
      card(t("heat_title"), { note: t("heat_note") }, heat(ctx, state.acceptance)));
  }
  return { root, update };
}
