// Every door: reading, threshold, since when; those that are shut come first.

import { h, card, swap, table, num, duration, empty, DASH } from "./dom.js";
import { t } from "./words.js";

const ORDER = { shut: 0, probing: 1, allowed: 2 };
const PILL = { shut: "err", probing: "warn", allowed: "ok" };

const FLOORS = new Set(["acceptance_floor", "memory_pressure"]); // shut when the reading is below

/** The reading as a bar, with a mark at the threshold. */
function meter(door) {
  if (door.reading === null || door.threshold === null || !(door.threshold > 0)) return null;
  const whole = Math.max(2 * door.threshold, 1.05 * door.reading);
  return h("div", { class: `meter ${door.state}`, "aria-hidden": "true" },
    h("i", { "width%": (100 * door.reading) / whole }), h("b", { "left%": (100 * door.threshold) / whole }));
}

/** What the reading has to keep to. */
const bound = (door) => (door.threshold === null ? DASH : `${FLOORS.has(door.guard) ? "≥" : "≤"} ${num(door.threshold)}`);

export function create(ctx) {
  const body = h("div", {});
  const root = h("div", { class: "grid" }, card(t("guards"), { flush: true, note: t("guards_note") }, body));
  function update() {
    const doors = [...(ctx.model?.guards || [])].sort((a, b) => ORDER[a.state] - ORDER[b.state]);
    if (!doors.length) { swap(body, empty(t("no_guards"))); return; }
    swap(body, table([{ name: t("state") }, { name: t("guard") }, { name: t("policy") }, { name: t("task") }, { name: t("reading"), num: true }, { name: t("threshold"), num: true },
      { name: "" }, { name: t("since"), num: true }, { name: t("opens_in"), num: true }, { name: t("trips"), num: true }, { name: t("reason") }],
    doors.map((d) => h("tr", {},
      h("td", {}, h("span", { class: `pill ${PILL[d.state]}` }, t(`state_${d.state}`)), d.mode === "enforce" ? null : h("span", { class: "small note" }, ` ${t(d.mode)}`)),
      h("th", { scope: "row" }, d.guard), h("td", {}, ctx.policy(d.policy)), h("td", { class: d.task ? null : "note" }, d.task || t("all_tasks")),
      h("td", { class: "num" }, num(d.reading), h("div", { class: "beside" }, d.num_samples ? `n ${num(d.num_samples)}` : "")),
      h("td", { class: "num" }, bound(d), h("div", { class: "beside" }, d.unit || "")), h("td", {}, meter(d)),
      h("td", { class: "num" }, duration(d.since_s)), h("td", { class: "num" }, duration(d.opens_in_s)),
      h("td", { class: d.num_trips ? "num" : "num dim" }, num(d.num_trips)), h("td", { class: "note" }, d.why || DASH)))));
  }
  return { root, update };
}
