/** How a question and an answer look. */

import { copyButton, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { percent } from "./status.js";

/** A question, which can be edited in its place and sent again. */
export class QuestionView {
  #message;
  #onEdit;

  constructor(message, { onEdit }) {
    this.#message = message;
    this.#onEdit = onEdit;
    this.element = element("article", { class: "message question", "aria-label": "You" });
    this.#show();
  }

  #show() {
    const { content } = this.#message;
    const edit = element("button", { type: "button", class: "quiet edit", onclick: () => this.#edit() }, "Edit");
    this.element.replaceChildren(
      element("div", { class: "bubble", dir: "auto" }, content),
      element("footer", {}, copyButton(() => content), edit),
    );
  }

  #edit() {
    const area = element("textarea", { "aria-label": "Edit your message", dir: "auto", rows: 3 });
    area.value = this.#message.content;
    const send = () => area.value.trim() && this.#onEdit(area.value.trim());
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#show();
      else if (isSend(event)) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.element.replaceChildren(
      area,
      element(
        "footer",
        {},
        element("button", { type: "button", class: "quiet", onclick: () => this.#show() }, "Cancel"),
        element("button", { type: "button", class: "primary", onclick: send }, "Send"),
      ),
    );
    area.focus();
  }
}

/** Enter sends; with Shift it is a new line, and while an input method composes it is the method's. */
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

/** An answer, which grows: at most once a frame, and less often where showing it takes long. */
export class AnswerView {
  #onRendered;
  #parts;
  #content;
  #reasoning;
  #frame = 0;
  #notBefore = 0;

  /** `onRendered()` is called when the answer has grown on the screen. */
  constructor(message, { onRegenerate, onRendered }) {
    this.#onRendered = onRendered;
    this.#parts = answerParts(message, onRegenerate);
    const { thinking, text, waiting, loading, note, error, footer } = this.#parts;
    this.element = element("article", { class: "message answer", "aria-label": "Answer" });
    this.element.append(thinking, text, waiting, loading, note, error, footer);
    this.#content = new MarkdownView(text);
    this.#reasoning = new MarkdownView(thinking.querySelector(".markdown"));
    if (message.reasoning) this.addReasoning(message.reasoning);
    if (message.content) this.addContent(message.content);
  }

  addReasoning(text) {
    this.#parts.thinking.hidden = false;
    this.#reasoning.append(text);
    this.#grow();
  }

  addContent(text) {
    this.#parts.summary.textContent = "Thoughts";
    this.#content.append(text);
    this.#grow();
  }

  /** The server is loading its model; `share` of it is done, or null if that is unknown. */
  showLoading(share) {
    const { loading, waiting } = this.#parts;
    loading.hidden = false;
    waiting.hidden = true;
    const [words, bar] = loading.children;
    words.textContent = `The server is loading the model${percent(share, ": ")}`;
    if (share === null) bar.removeAttribute("value");
    else bar.value = share;
    this.#onRendered();
  }

  showFigures(text) {
    this.#parts.figures.textContent = text;
  }

  start() {
    this.element.setAttribute("aria-busy", "true");
    this.#parts.waiting.hidden = false;
  }

  /** Shows all that has arrived, and how the answer ended. */
  finish({ figures, note, error }) {
    cancelAnimationFrame(this.#frame);
    this.#render();
    const parts = this.#parts;
    this.element.removeAttribute("aria-busy");
    parts.waiting.hidden = parts.loading.hidden = true;
    parts.summary.textContent = "Thoughts";
    for (const [part, text] of [[parts.note, note], [parts.error, error]]) {
      part.textContent = text;
      part.hidden = !text;
    }
    this.showFigures(figures);
    this.#onRendered();
  }

  #grow() {
    this.#parts.waiting.hidden = this.#parts.loading.hidden = true;
    this.#frame ||= requestAnimationFrame(() => this.#whenDue());
  }

  #whenDue() {
    this.#frame = 0;
    const start = performance.now();
    if (start < this.#notBefore) {
      this.#frame = requestAnimationFrame(() => this.#whenDue());
      return;
    }
    this.#render();
    this.#onRendered();
    this.#notBefore = start + 3 * (performance.now() - start); // leaves most of the time to the reader
  }

  #render() {
    this.#reasoning.render();
    this.#content.render();
  }
}

function answerParts(message, onRegenerate) {
  const summary = element("summary", {}, "Thinking …");
  const figures = element("span", { class: "figures" });
  const regenerate = element("button", { type: "button", class: "quiet regenerate", onclick: onRegenerate });
  regenerate.textContent = "Try again";
  return {
    summary,
    figures,
    thinking: element("details", { class: "thinking", hidden: true }, summary, element("div", { class: "markdown" })),
    text: element("div", { class: "markdown" }),
    waiting: element("p", { class: "waiting", hidden: true, "aria-label": "Waiting for the answer" }, "● ● ●"),
    loading: element("div", { class: "loading", hidden: true }, element("span"), element("progress", { max: 1 })),
    note: element("p", { class: "note", hidden: true }),
    error: element("p", { class: "error", hidden: true, role: "alert", dir: "auto" }),
    footer: element("footer", {}, copyButton(() => message.content), regenerate, figures),
  };
}
