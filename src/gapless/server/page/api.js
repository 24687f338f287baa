/** The server as the page sees it. Addresses are relative to the page, so that it works under any prefix. */

/** How long to wait between two looks at a server that is loading its model. */
const LOADING_PAUSE_MS = 1000;

/** What the server answered instead of what was asked; `status` is null for a failure in the midst of an answer. */
export class ServerError extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

export class Api {
  /** `key()` returns the API key, or "". */
  constructor(key) {
    this.key = key;
  }

  /** What the server does, whatever the HTTP status: it says so too while it loads. */
  async stats(signal) {
    const response = await this.#fetch("stats", { signal });
    const stats = await response.json().catch(() => null);
    if (typeof stats?.status === "string") return stats;
    throw new ServerError(messageOf(stats, response), response.status);
  }

  /** Its models: [{id, max_model_len}]. */
  async models(signal) {
    const response = await this.#checked("v1/models", { signal });
    return (await response.json()).data ?? [];
  }

  /** Asks for an answer; an iterator over its chunks. Leaving the iterator, or `signal`, closes the connection. */
  async chat(body, signal) {
    const response = await this.#checked("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    return chunks(response);
  }

  /** Waits while the model is being loaded, telling `progress` how far it is. False if it isn't being loaded. */
  async waitWhileLoading(progress, signal) {
    let waited = false;
    for (;;) {
      const stats = await this.stats(signal);
      if (stats.status !== "loading") return waited;
      waited = true;
      progress(stats.loading ?? null);
      await pause(LOADING_PAUSE_MS, signal);
    }
  }

  async #checked(path, options) {
    const response = await this.#fetch(path, options);
    if (response.ok) return response;
    throw new ServerError(messageOf(await response.json().catch(() => null), response), response.status);
  }

  async #fetch(path, { headers = {}, ...options }) {
    const key = this.key();
    if (key) headers = { ...headers, Authorization: `Bearer ${key}` };
    try {
      return await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server can't be reached. Is it still running?");
    }
  }
}

/** The chunks of a streamed answer. ServerError if one is an error, or if the answer breaks off. */
async function* chunks(response) {
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = parse(data);
    if (chunk.error) throw new ServerError(messageOf(chunk, response));
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer was complete.");
}

/** The data of the server-sent events in a body. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim(); // each of the server's events has one line
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server was lost.");
  }
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ServerError("The server sent something that can't be read.");
  }
}

function messageOf(body, response) {
  const message = body?.error?.message ?? body?.detail;
  return typeof message === "string" ? message : `The server answered ${response.status} ${response.statusText}`.trim();
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
    signal.addEventListener("abort", stop, { once: true });
  });
}
