// Requests to the server that this page came from: keys, errors in the server's own words, streams of events.
// Addresses are relative to the page, so that it also works behind a proxy's prefix. Nothing else of the page calls fetch.

const STORED = { api: "radixpd-key", admin: "radixpd-admin-key" };

/** An answer that is not 2xx, or an error event; `message` is the server's. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Keep a key for this tab; kind is "api" or "admin". */
export function keepKey(kind, key) {
  sessionStorage.setItem(STORED[kind], key);
}

function headers(kind) {
  const key = (kind === "admin" && sessionStorage.getItem(STORED.admin)) || sessionStorage.getItem(STORED.api);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** One request: GET, or POST with a body. Anything but success is a ServerError. */
export async function ask(path, { body, signal, kind = "api" } = {}) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...options, headers: headers(kind), signal, cache: "no-store" }).catch(inPlainWords);
  if (!response.ok) throw new ServerError(await errorText(response), response.status);
  return response;
}

/** As `ask`; the JSON of the answer. */
export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

// A connection that fails is a TypeError in each browser's own words.
function inPlainWords(error) {
  throw error instanceof TypeError ? new ServerError("there is no connection to the server", 0) : error;
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status} ${response.statusText}`;
  }
}

/** The events of a streamed answer, parsed. An error event, and an end without [DONE], are thrown. */
export async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of chunks(response.body)) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ServerError(event.error.message, event.error.code);
      yield event;
    }
  }
  throw new ServerError("the connection ended before the answer did", 0);
}

// Not every browser can loop over a stream itself.
async function* chunks(body) {
  const reader = body.getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
  } finally {
    reader.releaseLock();
  }
}
