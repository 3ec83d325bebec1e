// A chat that streams, with the tokens that came from accepted drafts in their drafter's colour.

import { h, card, swap, num, ms, seconds, DASH } from "./dom.js";
import { stream } from "./api.js";
import { t } from "./words.js";

export function create(ctx) {
  // What was said outlives the page's being drawn anew, in another language or after another page.
  ctx.chat ??= { turns: [], log: h("div", { class: "chat", role: "log", tabindex: "0" }) };
  const { turns, log } = ctx.chat;
  log.setAttribute("aria-label", t("chat_title"));
  const box = h("textarea", { rows: "3", id: "chat-box", "aria-label": t("message"), value: turns.length ? "" : t("example") });
  const policy = h("select", { id: "chat-policy" }, [["auto", t("auto")], ["baseline", "baseline"], ...ctx.methods.map((m) => [m, m])].map(([v, name]) => h("option", { value: v }, name)));
  const temperature = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0" });
  const maxTokens = h("input", { type: "number", min: "1", max: "4096", step: "1", value: "120" });
  const send = h("button", { type: "button", class: "primary", id: "chat-send", onclick: run }, t("send"));
  const stop = h("button", { type: "button", onclick: () => ctx.chat.abort?.abort() }, t("stop"));
  const clear = h("button", { type: "button", class: "quiet", onclick: () => { turns.length = 0; swap(log); } }, t("clear"));
  const legend = h("div", { class: "legend" }, h("span", {}, t("from_target")), ctx.methods.map((m) => h("span", { class: "policy" }, h("i", { class: `swatch ${ctx.color(m)}` }), t("accepted_from", m))));

  function show(element, pieces) {
    for (const { text, accepted } of pieces) {
      const last = element.lastChild, cls = accepted ? `acc ${ctx.color(accepted)}` : "";
      if (last && last.nodeType === Node.ELEMENT_NODE && last.className === cls && !accepted) last.append(text);
      else element.append(h("span", { class: cls || null, title: accepted ? t("accepted_from", accepted) : null }, text));
    }
    log.scrollTop = log.scrollHeight;
  }

  function facts(end) {
    const x = end.specgate, usage = end.usage, fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
    const pair = (key) => `${ms(x.timings[key])} ms (${t("predicted")} ${ms(x.predicted[key])})`;
    return h("div", { class: "facts" }, fact(t("policy"), x.policy), fact(t("reason"), x.reason), fact(t("task"), x.task),
      h("span", {}, h("b", {}, t("target_steps_for", num(x.num_target_steps), num(usage.completion_tokens)))),
      fact(t("mean_length"), x.mean_acceptance_length ? x.mean_acceptance_length.toFixed(2) : DASH), fact("TTFT", pair("ttft_ms")), fact("TPOT", pair("tpot_ms")), fact("E2E", pair("e2e_ms")),
      x.costs?.device_s ? fact(t("device_time"), seconds(x.costs.device_s)) : null);
  }

  async function run() {
    const text = box.value.trim();
    if (!text || ctx.chat.abort) return;
    turns.push({ role: "user", content: text });
    box.value = "";
    const answer = h("div", { class: "turn assistant", "data-answer": true });
    log.append(h("div", { class: "turn user" }, text), answer);
    ctx.chat.abort = new AbortController();
    update();
    let whole = "";
    try {
      const body = { model: ctx.modelName, messages: turns, stream: true, stream_options: { include_usage: true }, temperature: Number(temperature.value), max_tokens: Number(maxTokens.value),
        specgate: { trace: true, ...(policy.value === "auto" ? {} : { policy: policy.value }) } };
      for await (const chunk of stream("v1/chat/completions", body, ctx.chat.abort.signal)) {
        for (const choice of chunk.choices) {
          const content = choice.delta?.content || "";
          whole += content;
          show(answer, choice.specgate?.pieces || (content ? [{ text: content, accepted: null }] : []));
        }
        if (chunk.usage) log.append(facts(chunk));
      }
    } catch (error) {
      if (error.name !== "AbortError") { log.append(h("div", { class: "pill err" }, error.message)); ctx.noteError(error); }
    } finally {
      turns.push({ role: "assistant", content: whole });
      ctx.chat.abort = null;
      update();
      log.scrollTop = log.scrollHeight;
    }
  }
  box.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); run(); } });
  const root = h("div", { class: "grid" }, card(t("chat_title"), { note: t("chat_note"), flush: true, tools: [legend] }, log,
    h("div", { class: "compose" }, box, h("label", {}, t("policy"), policy), h("label", {}, t("temperature"), temperature), h("label", {}, t("max_tokens"), maxTokens), send, stop, clear)));
  function update() {
    send.disabled = Boolean(ctx.chat.abort);
    stop.disabled = !ctx.chat.abort;
  }
  return { root, update };
}
