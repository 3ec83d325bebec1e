// The last decisions; a click shows their candidates, terms, and the outcome beside the prediction.

import { h, card, swap, table, num, ms, clock, empty, DASH, seconds } from "./dom.js";
import { t } from "./words.js";

/** Candidates side by side, and the terms of each. Also what the page Explain shows. */
export function candidates(entry, ctx) {
  const all = entry.candidates || [];
  const rows = all.map((c) => {
    const p = c.predicted || {}, isChosen = c.policy === entry.policy;
    return h("tr", { class: isChosen ? "chosen" : null },
      h("th", { scope: "row" }, ctx.policy(c.policy)), h("td", { class: "num" }, num(c.num_speculative_tokens)),
      h("td", { class: "num" }, ms(p.ttft_ms)), h("td", { class: "num" }, ms(p.tpot_ms)), h("td", { class: "num" }, ms(p.e2e_ms)),
      h("td", {}, h("span", { class: `pill ${isChosen ? "accent" : c.allowed ? "ok" : "err"}` }, t(isChosen ? "chosen" : c.allowed ? "allowed" : "not_allowed"))),
      h("td", {}, c.why_not || DASH));
  });
  const told = all.filter((c) => (c.terms || []).length);
  const names = [...new Set(told.flatMap((c) => c.terms.map((term) => term.name)))];
  const find = (c, name) => c.terms.find((term) => term.name === name);
  const cell = (term) => (term
    ? h("td", { class: "num" }, h("span", { class: "beside" }, `${num(term.value)} ${term.unit || ""} × ${num(term.coefficient)} =`), ms(term.effect_ms))
    : h("td", { class: "num dim" }, DASH));
  return h("div", { class: "stack" },
    h("h3", {}, t("candidates")),
    h("div", { class: "scroll" }, table([{ name: t("policy") }, { name: t("draft_tokens"), num: true }, { name: "TTFT ms", num: true }, { name: "TPOT ms", num: true },
      { name: "E2E ms", num: true }, { name: "" }, { name: t("why_not") }], rows)),
    told.length ? h("h3", {}, t("terms")) : null,
    told.length ? h("div", { class: "scroll" }, table([{ name: t("term") }, ...told.map((c) => ({ name: `${c.policy}, ms`, num: true }))],
      [...names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), told.map((c) => cell(find(c, name))))),
        h("tr", { class: "total" }, h("th", { scope: "row" }, t("sum")), told.map((c) => h("td", { class: "num" }, ms(c.terms.reduce((a, x) => a + x.effect_ms, 0)))))],
      { class: "terms" })) : null);
}

/** What was believed about the request: task, length, load. */
export function beliefs(entry) {
  const top = Object.entries(entry.task_probabilities || {}).sort((a, b) => b[1] - a[1]).slice(0, 3);
  const load = Object.entries(entry.load || {}).filter(([, v]) => v !== null);
  const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
  return h("div", { class: "facts" },
    top.length ? fact(t("probabilities"), top.map(([k, v]) => `${k} ${v.toFixed(2)}`).join(", ")) : null,
    entry.output_tokens ? fact(t("expected_output"), `p50 ${num(Math.round(entry.output_tokens.p50))}, p90 ${num(Math.round(entry.output_tokens.p90))}`) : null,
    load.length ? fact(t("load_seen"), load.map(([k, v]) => `${k} ${num(v)}`).join(", ")) : null);
}

export function create(ctx) {
  const body = h("tbody"), rows = new Map(), open = new Set();
  const note = h("div", {});
  const choice = { policy: "", outcome: "" };
  const select = (name, options) => h("label", {}, t(name), h("select", { onchange: (e) => { choice[name] = e.target.value; update(); } },
    h("option", { value: "" }, t("any")), options.map((o) => h("option", { value: o }, o))));
  const root = h("div", { class: "grid" }, card(t("decisions"), { flush: true, note: t("beside"), tools: [
    select("policy", ["baseline", ...ctx.methods]), select("outcome", ["ok", "error", "cancelled", "deadline"])] },
  h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, ""), ["time", "task", "policy", "reason"].map((k) => h("th", { scope: "col" }, t(k))),
    h("th", { scope: "col", class: "num" }, t("tokens")), h("th", { scope: "col", class: "num" }, t("mean_length")),
    ["TTFT ms", "TPOT ms", "E2E ms"].map((k) => h("th", { scope: "col", class: "num" }, k)), h("th", { scope: "col" }, t("outcome")))), body), note));

  function detail(entry) {
    const counts = entry.counts || {}, costs = entry.costs || {};
    const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
    return h("tr", { class: "detail", id: `d-${entry.request_id}` }, h("td", { colspan: "11" }, h("div", { class: "stack" },
      h("div", { class: "facts" }, fact(t("request_id"), entry.request_id), entry.tenant ? fact(t("tenant"), entry.tenant) : null,
        fact(t("target_steps"), num(counts.num_target_steps)), fact(t("steps_saved"), num(counts.num_target_steps_saved)),
        fact(t("draft_tokens"), `${num(counts.num_accepted_tokens)} / ${num(counts.num_draft_tokens)}`),
        fact(t("device_time"), seconds(costs.device_s)), costs.amount !== null && costs.amount !== undefined ? fact(t("cost"), `${num(costs.amount)} ${costs.currency}`) : null,
        entry.arm ? fact(t("kind_rollout"), `${entry.rollout}, ${entry.arm}`) : null),
      beliefs(entry),
      (entry.policy_changes || []).length ? h("div", { class: "facts" }, fact(t("changes"), entry.policy_changes.map((c) => t("from_token", c.token_index, c.policy, c.reason)).join("; "))) : null,
      candidates(entry, ctx))));
  }

  function toggle(entry) {
    const row = rows.get(entry.request_id + entry.time);
    const isOpen = row.button.getAttribute("aria-expanded") === "true";
    row.button.setAttribute("aria-expanded", String(!isOpen));
    row.button.textContent = isOpen ? "+" : "−";
    if (isOpen) { row.detail?.remove(); row.detail = null; open.delete(entry.request_id); } else {
      row.detail = detail(entry);
      row.element.after(row.detail);
      open.add(entry.request_id);
    }
  }

  function line(entry) {
    const measured = entry.timings || {}, foreseen = entry.predicted || {}, counts = entry.counts;
    const pair = (key) => h("td", { class: "num" }, ms(measured[key]), h("div", { class: "beside" }, foreseen[key] === null || foreseen[key] === undefined ? DASH : ms(foreseen[key])));
    const length = counts && counts.num_drafts ? 1 + counts.num_accepted_tokens / counts.num_drafts : null;
    const button = h("button", { class: "fold", type: "button", "aria-expanded": "false", "aria-label": `${t("unfold")} ${entry.request_id}`, "data-key": `f-${entry.request_id}` }, "+");
    const element = h("tr", { class: "decision", onclick: () => toggle(entry) }, h("td", {}, button), h("td", {}, clock(entry.time)),
      h("td", {}, entry.task), h("td", {}, ctx.policy(entry.policy)), h("td", { class: "note" }, entry.reason),
      h("td", { class: "num" }, num(entry.num_output_tokens)), h("td", { class: "num" }, length === null ? DASH : length.toFixed(2)),
      pair("ttft_ms"), pair("tpot_ms"), pair("e2e_ms"),
      h("td", {}, h("span", { class: `pill ${entry.outcome === "ok" ? "ok" : entry.outcome === "cancelled" ? "" : "err"}` }, entry.outcome)));
    return { element, button, detail: null, entry };
  }

  function update() {
    const wanted = ctx.decisions.filter((d) => (!choice.policy || d.policy === choice.policy) && (!choice.outcome || d.outcome === choice.outcome));
    const seen = new Set();
    let place = null;
    for (const entry of wanted) {
      const key = entry.request_id + entry.time;
      seen.add(key);
      let row = rows.get(key);
      if (!row) { row = line(entry); rows.set(key, row); row.element.classList.add("fresh"); }
      const after = place ? place.nextSibling : body.firstChild;
      if (after !== row.element) body.insertBefore(row.element, after);
      place = row.element;
      if (row.detail) { if (place.nextSibling !== row.detail) place.after(row.detail); place = row.detail; }
    }
    for (const [key, row] of rows) if (!seen.has(key)) { row.element.remove(); row.detail?.remove(); rows.delete(key); }
    swap(note, wanted.length ? [] : empty(t("no_decisions")));
  }
  return { root, update };
}
