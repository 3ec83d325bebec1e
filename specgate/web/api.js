// Calls to the server this page came from. Keys live in sessionStorage only: they end with the tab.

const ADMIN = "specgate.admin-token", API = "specgate.api-key";

export class HttpError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const keys = {
  get admin() { return sessionStorage.getItem(ADMIN) || ""; },
  get api() { return sessionStorage.getItem(API) || ""; },
  set(admin, api) {
    for (const [name, value] of [[ADMIN, admin], [API, api]]) {
      if (value) sessionStorage.setItem(name, value); else sessionStorage.removeItem(name);
    }
  },
};

function headers(path, hasBody) {
  const key = path.startsWith("v1/") ? keys.api || keys.admin : keys.admin;
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...(hasBody ? { "Content-Type": "application/json" } : {}) };
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try { message = (await response.json()).error.message; } catch { /* no JSON: the status says it */ }
  return new HttpError(response.status, message);
}

/** JSON of a path. Throws HttpError, or TypeError when nobody answers. */
export async function call(path, { method = "GET", body } = {}) {
  const response = await fetch(path, {
    method, headers: headers(path, body !== undefined), cache: "no-store",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Relayed streams come as their server wrote them: with comments, other fields, CRLF or no space after the colon.
function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}

/** Payloads of a stream of server-sent events, as they come. */
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", headers: headers(path, true), body: JSON.stringify(body), signal, cache: "no-store",
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const data = dataOf(block);
      if (!data) continue;
      if (data === "[DONE]") return;
      const payload = JSON.parse(data);
      if (payload.error) throw new HttpError(payload.error.code, payload.error.message);
      yield payload;
    }
  }
}
