// Elements, and numbers as text. No framework: views build small trees and replace them.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else if (name === "width%") element.style.width = `${value}%`;
    else if (name === "left%") element.style.left = `${value}%`;
    else if (name === "background") element.style.background = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** An element. Attributes that start with "on" are listeners. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An element of a drawing. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Replace what is in `parent`; whoever had the focus (by data-key) has it again. */
export function swap(parent, ...children) {
  const active = document.activeElement;
  const key = active && parent.contains(active) ? active.dataset.key : undefined;
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  if (key) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
  return parent;
}

/** A titled panel. */
export function card(title, { size = "", note = "", flush = false, tools = [] } = {}, ...children) {
  const id = `h-${Math.random().toString(36).slice(2)}`;
  return h("section", { class: `card ${size}`, "aria-labelledby": id },
    h("header", {}, h("h2", { id }, title), note ? h("span", { class: "note" }, note) : null,
      h("span", { class: "grow" }), tools),
    h("div", { class: flush ? "body flush" : "body" }, children));
}

export const empty = (text) => h("p", { class: "empty" }, text);

/** A table of `columns` ({name, num}) and rows of cells. */
export function table(columns, rows, attributes = {}) {
  return h("table", attributes, columns.some((c) => c.name !== "") &&
    h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col", class: c.num ? "num" : null }, c.name)))),
    h("tbody", {}, rows));
}

export const DASH = "–";

/** Three significant digits; whole numbers as they are. */
export function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-3) return value.toExponential(digits - 1);
  return Number(value.toPrecision(digits)).toString();
}

export const percent = (value) => (value === null || value === undefined ? DASH : `${num(value * 100)} %`);

/** Milliseconds; whole ones from 100 on. */
export function ms(value) {
  if (value === null || value === undefined) return DASH;
  return value >= 100 ? Math.round(value).toLocaleString("en-US") : num(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${num(value)} ${units[at]}`;
}

/** Seconds as 42 s, 3 min, 5 h, 2 d. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 100) return `${seconds < 10 ? num(seconds, 2) : Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${num(seconds / 3600, 2)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const two = (value) => String(value).padStart(2, "0");

/** Local time of day of a Unix time; with the date when that is not today's. */
export function clock(unix, withSeconds = true) {
  const at = new Date(unix * 1000);
  const time = `${two(at.getHours())}:${two(at.getMinutes())}${withSeconds ? `:${two(at.getSeconds())}` : ""}`;
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? time : `${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
}

/** Seconds in the unit that reads best: "8.88 ms". */
export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0 ms";
  if (size >= 1) return `${num(value)} s`;
  if (size >= 1e-3) return `${num(value * 1e3)} ms`;
  if (size >= 1e-6) return `${num(value * 1e6)} µs`;
  return `${num(value * 1e9)} ns`;
}
