// The first page: load now, what happened, and how it went over the last half hour or day.

import { h, card, swap, num, ms, percent, clock, duration, empty, DASH } from "./dom.js";
import { bars, lines, spark, strip } from "./charts.js";
import { t } from "./words.js";

const SPAN = { "30m": 1800, "24h": 86400 };

export function create(ctx) {
  const tiles = h("div", { class: "tiles" });
  const events = h("div", {}), charts = h("div", { class: "grid card-free" });
  charts.style.gridColumn = "span 12";
  let onlyTrouble = false;
  const root = h("div", { class: "grid" }, tiles, events, charts);
  events.style.gridColumn = "span 12";

  /** The chosen range; less while the server is younger than that. */
  const span = () => Math.min(SPAN[ctx.range], Math.max(120, ctx.state.uptime_s * 1.05));

  function segments(label, options, current, choose) {
    return h("div", { class: "segments", role: "group", "aria-label": label }, options.map(([key, name]) =>
      h("button", { type: "button", "data-key": `seg-${key}`, "aria-pressed": String(key === current), onclick: () => choose(key) }, name)));
  }

  function drawTiles() {
    const { model } = ctx;
    if (!model) return;
    const samples = ctx.history["30m"].samples, last = samples.at(-1) || {};
    const engine = model.engine, load = model.load;
    const recent = samples.slice(-72);
    const tile = (name, value, unit, key) => h("div", { class: "tile" }, h("div", { class: "name" }, name),
      h("div", { class: "value" }, value, unit && value !== DASH ? h("small", {}, unit) : null), spark(recent.map((x) => (key ? x[key] : null))));
    const used = engine.num_total_blocks ? engine.num_used_blocks / engine.num_total_blocks : null;
    swap(tiles,
      tile(t("running"), num(model.num_admitted), t("requests"), "running"),
      tile(t("waiting"), num(load.num_queued + load.num_waiting), t("requests"), "waiting"),
      tile(t("tokens_per_s"), num(last.tokens_per_s), t("unit_tokens_s"), "tokens_per_s"),
      tile(t("requests_per_s"), num(load.requests_per_s), t("unit_requests_s"), "arrivals"),
      tile(t("queue_wait_p95"), ms(load.queue_wait_p95_ms ?? last.queue_wait_p95_ms), "ms", "queue_wait_p95_ms"),
      tile(t("kv_used"), percent(used), "", "used_kv_ratio"));
    tiles.lastChild.title = t("blocks", num(engine.num_used_blocks), num(engine.num_total_blocks));
  }

  function drawEvents() {
    const to = Date.now() / 1000, from = to - span();
    const shown = ctx.events.filter((e) => !onlyTrouble || e.level !== "info");
    const list = h("ol", { class: "events", tabindex: "0", "aria-label": t("what_happened"), "data-key": "events" }, shown.map((e) => h("li", {},
      h("time", { datetime: new Date(e.time * 1000).toISOString() }, clock(e.time)),
      h("span", {}, h("span", { class: `pill ${{ info: "", warning: "warn", error: "err" }[e.level]}` }, t(`kind_${e.kind}`)),
        e.subject ? h("span", { class: "small note" }, ` ${e.subject}`) : null),
      h("span", {}, e.message), h("span", { class: "note small" }, e.num > 1 ? `× ${num(e.num)}` : ""))));
    const top = events.querySelector(".events")?.scrollTop || 0;
    swap(events, card(t("what_happened"), { flush: true, tools: [
      segments(t("filter"), [["all", t("all_events")], ["trouble", t("only_trouble")]], onlyTrouble ? "trouble" : "all",
        (key) => { onlyTrouble = key === "trouble"; drawEvents(); }),
      segments(t("range"), [["30m", t("range_30m")], ["24h", t("range_24h")]], ctx.range, (key) => ctx.setRange(key))] },
    h("div", { class: "body" }, strip({ events: shown, from, to, label: t("what_happened") })),
    shown.length ? list : empty(t("nothing_happened"))));
    list.scrollTop = top;
  }

  function drawCharts() {
    const { interval_s: interval, samples } = ctx.history[ctx.range];
    const to = Date.now() / 1000, common = { from: to - span(), to, interval, events: ctx.events };
    const names = [...new Set(["baseline", ...ctx.methods, ...samples.flatMap((x) => Object.keys(x.policies))])];
    const points = (key) => samples.map((x) => [x.time + interval / 2, x[key]]);
    const legend = (items) => h("div", { class: "legend" }, items.map(([color, name]) =>
      h("span", { class: "policy" }, h("i", { class: `swatch ${color}` }), name)));
    swap(charts,
      card(t("policy_mix"), { size: "half", note: t("per_interval", duration(interval)) },
        bars({ ...common, names, color: ctx.color, label: t("policy_mix"), samples: samples.map((x) => ({ time: x.time, parts: x.policies })) }),
        legend(names.map((name) => [ctx.color(name), name]))),
      card(t("throughput"), { size: "half", note: t("unit_tokens_s") },
        lines({ ...common, label: t("throughput"), series: [{ color: "c-1", area: true, points: points("tokens_per_s") }] }),
        legend([["c-1", t("tokens_per_s")]])),
      card(t("load_over_time"), { size: "half", note: t("running_waiting") },
        lines({ ...common, label: t("load_over_time"), series: [
          { color: "c-1", area: true, points: points("running") }, { color: "c-3", points: points("waiting") }] }),
        legend([["c-1", t("running")], ["c-3", t("waiting")]])),
      card(t("latency_over_time"), { size: "half", note: "ms" },
        lines({ ...common, isLog: true, label: t("latency_over_time"), series: [
          { color: "c-3", points: points("queue_wait_p95_ms") }, { color: "c-2", points: points("ttft_p95_ms") }, { color: "c-1", points: points("tpot_p50_ms") }] }),
        legend([["c-3", t("queue_wait_p95")], ["c-2", "TTFT p95"], ["c-1", "TPOT p50"]])));
  }

  return { root, update() { drawTiles(); drawEvents(); drawCharts(); } };
}
