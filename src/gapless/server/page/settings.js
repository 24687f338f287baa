/** The side panel: parameters of the answers, and the API key. */

import { load, save } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

export class Settings {
  #form;
  #fields;

  /** `onKey()` is called when the key has changed. */
  constructor(form, { onKey }) {
    this.#form = form;
    this.#fields = [...form.elements].filter((field) => field.name);
    const stored = load("settings") ?? {};
    for (const field of this.#fields) {
      if (typeof stored[field.name] === "string") field.value = stored[field.name];
    }
    this.#keyField.value = this.key;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => this.#save());
    this.#keyField.addEventListener("change", () => {
      this.key = this.#keyField.value;
      onKey();
    });
    form.querySelector("[data-action=reset]").addEventListener("click", () => this.#reset());
  }

  /** The API key, or "". */
  get key() {
    const stored = load("key");
    // A header holds nothing but these characters; the browser would refuse the request.
    return typeof stored === "string" ? stored.replace(/[^\x21-\x7e]/g, "") : "";
  }

  set key(value) {
    save("key", value.trim() || null);
    this.#keyField.value = value.trim();
  }

  get systemPrompt() {
    return this.#form.elements.system.value.trim();
  }

  /** The parameters that have been set, under the API's names. What is left empty is the server's to choose. */
  parameters() {
    const set = {};
    for (const name of NUMBERS) {
      const { value } = this.#form.elements[name];
      if (value !== "") set[name] = Number(value);
    }
    const stop = this.#form.elements.stop.value.split("\n").filter((line) => line !== "");
    if (stop.length > 0) set.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
    return set;
  }

  get #keyField() {
    return this.#form.querySelector("[data-key]");
  }

  #save() {
    save("settings", Object.fromEntries(this.#fields.map((field) => [field.name, field.value])));
  }

  #reset() {
    for (const field of this.#fields) field.value = "";
    this.#save();
  }
}
