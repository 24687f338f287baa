/** How quickly an answer comes: from what arrives while it runs, from the server's count of tokens at its end. */

import { plural } from "./dom.js";

export class Figures {
  #sent = performance.now();
  #first = null;
  #last = null;
  #numPieces = 0;
  #usage = null;

  /** A piece of the answer has arrived; servers send one for each token, as a rule. */
  piece() {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#numPieces++;
  }

  /** The server's count, at the end of the answer. */
  set usage(usage) {
    this.#usage = usage;
  }

  /** "128 tokens · 41.2 tok/s · first token after 0.31 s · context 512 of 8,192" */
  text(maxModelLen) {
    if (this.#first === null) return "";
    const figures = [];
    const numTokens = this.#usage?.completion_tokens ?? this.#numPieces;
    if (this.#usage) figures.push(plural(numTokens, "token"));
    const seconds = (this.#last - this.#first) / 1000;
    if (numTokens > 1 && seconds > 0) figures.push(`${decimals((numTokens - 1) / seconds)} tok/s`);
    figures.push(`first token after ${decimals((this.#first - this.#sent) / 1000, 2)} s`);
    if (this.#usage?.total_tokens && maxModelLen) {
      figures.push(`context ${count(this.#usage.total_tokens)} of ${count(maxModelLen)}`);
    }
    return figures.map((figure) => figure.replaceAll(" ", "\u00a0")).join(" · "); // lines break between figures
  }
}

function decimals(value, digits = 1) {
  return value >= 100 ? count(Math.round(value)) : value.toFixed(digits);
}

function count(value) {
  return value.toLocaleString("en");
}
