/** The line that says what the server does, asked once a second while the page can be seen. */

const PAUSE_MS = 1000;
const PAUSE_UNREACHABLE_MS = 3000;

export class Status {
  #api;
  #root;
  #model;
  #onUnauthorized;
  #timer = 0;
  #polling = false;

  /** `onUnauthorized(message)` is called when the server wants a key; `refresh` goes on then. */
  constructor(api, { root, model, onUnauthorized }) {
    this.#api = api;
    this.#root = root;
    this.#model = model;
    this.#onUnauthorized = onUnauthorized;
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  /** Asks now, and from now on. */
  async refresh() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#polling) return;
    this.#polling = true;
    let pause = PAUSE_MS;
    try {
      this.#show(await this.#api.stats());
    } catch (error) {
      pause = error.status === 401 ? null : PAUSE_UNREACHABLE_MS;
      this.#fail(error);
    } finally {
      this.#polling = false;
    }
    if (pause !== null && !document.hidden) this.#timer = setTimeout(() => this.refresh(), pause);
  }

  #show(stats) {
    this.#model.textContent = stats.model ?? "";
    const loading = stats.status === "loading";
    this.#root.dataset.state = loading ? "loading" : stats.num_running > 0 ? "busy" : "ready";
    if (loading) {
      this.#text(`Loading the model${percent(stats.loading, " ")}`);
      return;
    }
    const figures = [];
    if (typeof stats.num_running === "number") {
      figures.push(`running ${stats.num_running} / ${stats.max_num_seqs}`, `waiting ${stats.num_waiting}`);
      figures.push(`KV ${percent(stats.kv_usage)}`);
    }
    if (stats.generation_tokens_per_s > 0) figures.push(`${Math.round(stats.generation_tokens_per_s)} tok/s`);
    this.#text(...(figures.length > 0 ? figures : ["ready"])); // the engine may be busy with its first step
  }

  #fail(error) {
    this.#root.dataset.state = "failed";
    if (error.status === 401) {
      this.#text("API key needed");
      this.#onUnauthorized(error.message);
    } else {
      this.#text(error.status === null ? "Server not reachable" : error.message);
    }
  }

  #text(...figures) {
    const spans = figures.map((text) => Object.assign(document.createElement("span"), { textContent: text }));
    this.#root.replaceChildren(...spans);
  }
}

/** 0.42 → "42 %"; "" if the server does not know. */
export function percent(share, before = "") {
  return typeof share === "number" ? `${before}${Math.round(share * 100)} %` : "";
}
