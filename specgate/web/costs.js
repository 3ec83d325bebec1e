// What was spent since the start: by policy, tenant and task, and where device time and memory went.

import { h, card, swap, table, num, seconds, bytes, empty, DASH } from "./dom.js";
import { t } from "./words.js";

export function create(ctx) {
  const root = h("div", { class: "grid" });
  function totals(entries, costs, nameOf) {
    const money = (value) => (value === null || value === undefined ? DASH : num(value));
    const rows = Object.entries(entries).map(([key, x]) => h("tr", {}, h("th", { scope: "row" }, nameOf(key)), h("td", { class: "num" }, num(x.num_requests)), h("td", { class: "num" }, num(x.num_output_tokens)),
      h("td", { class: "num" }, num(x.num_target_steps)), h("td", { class: "num" }, num(x.num_target_steps_saved)), h("td", { class: "num" }, seconds(x.draft_s)), h("td", { class: "num" }, seconds(x.device_s)),
      h("td", { class: "num" }, seconds(x.num_requests ? x.device_s / x.num_requests : null)), h("td", { class: "num" }, seconds(x.num_output_tokens ? (1000 * x.device_s) / x.num_output_tokens : null)),
      costs.price_per_device_hour === null ? null : [h("td", { class: "num" }, money(x.amount)), h("td", { class: "num" }, money(x.num_output_tokens ? (1000 * x.amount) / x.num_output_tokens : null))],
      x.network_s ? h("td", { class: "num" }, seconds(x.network_s)) : null));
    if (!rows.length) return empty(t("no_data"));
    const hasNetwork = Object.values(entries).some((x) => x.network_s);
    return table([{ name: "" }, { name: t("n_req"), num: true }, { name: t("tokens"), num: true }, { name: t("target_steps"), num: true }, { name: t("steps_saved"), num: true }, { name: t("draft_time"), num: true },
      { name: t("device_time"), num: true }, { name: t("per_request"), num: true }, { name: t("per_1k"), num: true },
      ...(costs.price_per_device_hour === null ? [] : [{ name: `${t("cost")}, ${costs.currency}`, num: true }, { name: `${costs.currency}, ${t("per_1k")}`, num: true }]), ...(hasNetwork ? [{ name: t("network_time"), num: true }] : [])], rows, { class: "totals" });
  }
  function split(costs) {
    const entries = Object.entries(costs.device_by_method);
    if (!entries.length) return empty(t("no_data"));
    const of = (p) => ["draft", "forward", "verify"].map((part) => p[`${part}_s`] || 0);
    const whole = entries.reduce((total, [, p]) => total + of(p).reduce((a, b) => a + b, 0), 0);
    return table([{ name: t("policy") }, ...["draft", "forward", "verify"].map((p) => ({ name: t(`part_${p}`), num: true })), { name: t("sum"), num: true }, { name: "" }],
      entries.map(([method, p]) => { const parts = of(p), sum = parts.reduce((a, b) => a + b, 0);
        return h("tr", {}, h("th", { scope: "row" }, ctx.policy(method)), parts.map((x) => h("td", { class: "num" }, seconds(x))), h("td", { class: "num" }, seconds(sum)),
          h("td", { class: ctx.color(method) }, h("div", { class: "meter", "aria-hidden": "true" }, h("i", { "width%": whole ? (100 * sum) / whole : 0 })))); }));
  }
  function memory() {
    const parts = Object.entries(ctx.model?.details?.memory_bytes || {});
    const whole = parts.reduce((total, [, v]) => total + v, 0);
    return parts.length ? table([{ name: "" }, { name: "", num: true }, { name: "" }], parts.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, t(name)), h("td", { class: "num" }, bytes(value)),
      h("td", { class: "c-1" }, h("div", { class: "meter", "aria-hidden": "true" }, h("i", { "width%": whole ? (100 * value) / whole : 0 })))))) : empty(t("no_data"));
  }
  function update() {
    const costs = ctx.state?.costs;
    if (!costs) return;
    const price = costs.price_per_device_hour === null ? t("no_price") : t("price", num(costs.price_per_device_hour), costs.currency);
    swap(root,
      card(t("by_policy"), { flush: true, note: t("since_start"), tools: [h("span", { class: "note small" }, price)] }, totals(costs.by_policy, costs, (k) => ctx.policy(k))),
      card(t("by_task"), { flush: true }, totals(costs.by_task, costs, (k) => k)),
      card(t("by_tenant"), { flush: true }, totals(costs.by_tenant, costs, (k) => k || t("no_tenant"))),
      card(t("device_split"), { size: "half", flush: true, note: t("checks_time", seconds(costs.consistency_checks_device_s)) }, split(costs)),
      card(t("memory"), { size: "half", flush: true }, memory()));
  }
  return { root, update };
}
