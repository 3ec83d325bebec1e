// Drawings by hand: lines, stacked bars, scatter, sparklines. All in SVG, sized by viewBox.

import { s, num, clock } from "./dom.js";

const W = 640, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 22;

/** A round number at or above `value`. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((m) => m * step).find((m) => m >= value * 0.999);
}

/** `floor` above 0: the y axis is logarithmic from there. */
function frame(height, top, from, to, label, floor = 0) {
  const x = (t) => LEFT + ((t - from) / Math.max(to - from, 1e-9)) * (W - LEFT - RIGHT);
  const share = (v) => (floor ? Math.log(Math.max(v, floor) / floor) / Math.log(top / floor) : v / top);
  const y = (v) => height - BOTTOM - share(v) * (height - TOP - BOTTOM);
  const chart = s("svg", { class: "chart", viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": label });
  const ticks = floor ? Array.from({ length: Math.round(Math.log10(top / floor)) + 1 }, (_, i) => floor * 10 ** i) : [0, top / 2, top];
  for (const tick of ticks) {
    const at = y(tick);
    chart.append(
      s("line", { class: tick === ticks[0] ? "axis" : "gridline", x1: LEFT, x2: W - RIGHT, y1: at, y2: at }),
      s("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, num(tick)));
  }
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    chart.append(s("text", { x: x(from + (to - from) * share), y: height - 5, "text-anchor": anchor },
      clock(from + (to - from) * share, to - from < 600)));
  }
  return { chart, x, y };
}

function marks(chart, x, from, to, height, events) {
  for (const event of events) {
    if (event.time < from || event.time > to || event.level === "info") continue;
    const at = x(event.time);
    chart.append(s("line", { class: `mark ${event.level}`, x1: at, x2: at, y1: TOP - 4, y2: TOP + 5 },
      s("title", {}, `${clock(event.time)} ${event.message}`)));
  }
}

/** Runs of points without a gap: where nothing was read there is no line. */
function runs(points, gap) {
  const out = [];
  for (const point of points) {
    if (point[1] === null || point[1] === undefined) continue;
    const last = out.at(-1);
    if (last && point[0] - last.at(-1)[0] <= gap) last.push(point); else out.push([point]);
  }
  return out;
}

/** `series`: [{color (class), points: [[time, value]], area}]. */
export function lines({ series, from, to, interval, label, isLog = false, events = [], height = 150 }) {
  const values = series.flatMap((one) => one.points.map((p) => p[1])).filter((v) => v > 0);
  const floor = isLog ? 10 ** Math.floor(Math.log10(Math.min(...values, 1000))) : 0;
  const most = Math.max(isLog ? 10 * floor : 0, ...values);
  const top = isLog ? 10 ** Math.ceil(Math.log10(most)) : ceiling(most);
  const { chart, x, y } = frame(height, top, from, to, label, floor);
  for (const one of series) {
    for (const run of runs(one.points, interval * 2.5)) {
      const path = run.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" L");
      const base = y(floor);
      if (one.area) {
        chart.append(s("path", { class: `area ${one.color}`,
          d: `M${x(run[0][0]).toFixed(1)},${base} L${path} L${x(run.at(-1)[0]).toFixed(1)},${base}Z` }));
      }
      chart.append(s("path", { class: `line ${one.color}`, d: run.length > 1 ? `M${path}` : `M${path} h2` }));
    }
  }
  marks(chart, x, from, to, height, events);
  return chart;
}

/** `samples`: [{time, parts: {name: number}}]; `names` from the bottom up, `color` gives a class. */
export function bars({ samples, names, color, from, to, interval, label, events = [], height = 150 }) {
  const sum = (sample) => names.reduce((total, name) => total + (sample.parts[name] || 0), 0);
  const top = ceiling(Math.max(0, ...samples.map(sum)));
  const { chart, x, y } = frame(height, top, from, to, label);
  const width = Math.max(1.2, x(from + interval) - x(from) - 0.6);
  for (const sample of samples) {
    let below = 0;
    for (const name of names) {
      const value = sample.parts[name] || 0;
      if (!value) continue;
      const at = y(below + value);
      chart.append(s("rect", { class: `bar ${color(name)}`, x: x(sample.time).toFixed(1), y: at.toFixed(1),
        width: width.toFixed(1), height: Math.max(0.5, y(below) - at).toFixed(1) },
      s("title", {}, `${clock(sample.time)} ${name}: ${num(value)}`)));
      below += value;
    }
  }
  marks(chart, x, from, to, height, events);
  return chart;
}

/** Ticks of a logarithmic axis: 1, 2, 5 times powers of ten, thinned. */
function logTicks(low, high) {
  const out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const m of high / low > 60 ? [1] : [1, 2, 5]) {
      const tick = m * 10 ** power;
      if (tick >= low && tick <= high) out.push(tick);
    }
  }
  return out;
}

/** `groups`: [{name, color, pairs: [[predicted, measured]]}] in ms; both axes logarithmic, the ideal dashed. */
export function scatter({ groups, label, xName, yName, height = 420 }) {
  const all = groups.flatMap((g) => g.pairs).flat().filter((v) => v > 0);
  if (!all.length) return null;
  const least = Math.min(...all), most = Math.max(...all), room = Math.max(1.15, Math.sqrt((2.5 * least) / most));
  const low = least / room, high = most * room, span = Math.log(high / low); // at least a factor of 2.5
  const left = 62, base = height - 40;
  const x = (v) => left + (Math.log(v / low) / span) * (W - left - RIGHT);
  const y = (v) => base - (Math.log(v / low) / span) * (base - TOP);
  const chart = s("svg", { class: "chart", viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": label });
  for (const tick of logTicks(low, high)) {
    chart.append(
      s("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: TOP, y2: base }),
      s("line", { class: "gridline", x1: left, x2: W - RIGHT, y1: y(tick), y2: y(tick) }),
      s("text", { x: x(tick), y: base + 16, "text-anchor": "middle" }, num(tick)),
      s("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, num(tick)));
  }
  const path = (points) => points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
  chart.append(
    s("polygon", { class: "band", points: path([[low, low], [low, low * 1.2], [high / 1.2, high], [high, high], [high, high / 1.2], [low * 1.2, low]]) }),
    s("polyline", { class: "ideal", points: path([[low, low], [high, high]]), fill: "none" }),
    s("text", { x: (left + W) / 2, y: height - 6, "text-anchor": "middle" }, xName),
    s("text", { x: 12, y: base / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${base / 2})` }, yName));
  for (const group of groups) {
    for (const [predicted, measured] of group.pairs) {
      if (predicted > 0 && measured > 0) {
        chart.append(s("circle", { class: `dot ${group.color}`, cx: x(predicted).toFixed(1), cy: y(measured).toFixed(1), r: 3 }));
      }
    }
  }
  return chart;
}

/** A small line without axes. */
export function spark(values) {
  const known = values.filter((v) => v !== null && v !== undefined);
  const chart = s("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", class: "chart", "aria-hidden": "true" });
  if (known.length < 2) return chart;
  const top = Math.max(...known, 1e-9);
  const step = 100 / (values.length - 1);
  const points = values.map((v, i) => [step * i, v === null || v === undefined ? null : 24 - (22 * v) / top]);
  for (const run of runs(points, step * 1.5)) {
    chart.append(s("polyline", { class: "spark", points: run.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" ") }));
  }
  return chart;
}

/** Ticks of what happened between two times. */
export function strip({ events, from, to, label }) {
  const height = 40;
  const x = (t) => LEFT / 4 + ((t - from) / (to - from)) * (W * 2 - LEFT / 2);
  const chart = s("svg", { class: "chart", viewBox: `0 0 ${W * 2} ${height}`, role: "img", "aria-label": label });
  chart.append(s("line", { class: "axis", x1: x(from), x2: x(to), y1: 18, y2: 18 }));
  for (const share of [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1]) {
    const at = from + (to - from) * share;
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    chart.append(s("line", { class: "axis", x1: x(at), x2: x(at), y1: 15, y2: 21 }),
      s("text", { x: x(at), y: 36, "text-anchor": anchor }, clock(at, to - from < 600)));
  }
  for (const event of [...events].reverse()) {
    if (event.time < from || event.time > to) continue;
    chart.append(s("line", { class: `mark ${event.level}`, x1: x(event.time), x2: x(event.time), y1: 5, y2: 18 },
      s("title", {}, `${clock(event.time)} ${event.message}`)));
  }
  return chart;
}
