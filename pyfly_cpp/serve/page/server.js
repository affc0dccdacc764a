// What the page asks of the server.

let ownKey = null; // where the browser keeps nothing

function keyOf() {
  try { return sessionStorage.getItem("key") ?? ownKey; } catch { return ownKey; }
}

/** Uses an API key until the tab is closed. */
export function useKey(key) {
  ownKey = key;
  try { sessionStorage.setItem("key", key); } catch { /* for this visit, then */ }
}

function headers() {
  const key = keyOf();
  if (/[^\x20-\x7e]/.test(key ?? "")) throw new Refused("the API key has characters that no key has: enter it again.", 401);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** The server refused; `status` is that of HTTP. */
export class Refused extends Error {
  constructor(message, status) {
    super(message.charAt(0).toUpperCase() + message.slice(1));
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const given = { headers: headers(), ...options };
  let response;
  try {
    response = await fetch(path, given);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer.", 0);
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try { message = (await response.json()).error.message; } catch { /* no JSON */ }
  if (response.status === 401 && !keyOf()) message = "The server asks for an API key: enter it above.";
  throw new Refused(message, response.status);
}

/** The served model, as /v1/models describes it. */
export const describeModel = async () => (await (await ask("v1/models")).json()).data[0];

/** The fields of a chat request, each with its ranges. */
export const describeFields = async () => (await (await ask("openapi.json")).json()).components.schemas.ChatRequest.properties;

/** The chunks of a streamed answer. Throws Refused, and AbortError after `signal`. */
export async function* stream(body, signal) {
  const response = await ask("v1/chat/completions", { method: "POST", signal, body: JSON.stringify({ ...body, stream: true }) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", isWhole = false;
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The connection to the server was lost.", 0);
    }
    if (read.done && !isWhole) throw new Refused("The connection to the server was lost.", 0);
    if (read.done) return;
    const events = (rest + read.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") isWhole = true;
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.message, 500);
      yield chunk;
    }
  }
}
