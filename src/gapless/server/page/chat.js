/** The conversation: what was said, what is being answered, and what of it is kept. */

import { ServerError } from "./api.js";
import { Figures } from "./figures.js";
import { AnswerView, QuestionView } from "./message_view.js";
import { load, loadMessages, save } from "./store.js";

const SAVE_EVERY_MS = 1000;
const FIGURES_EVERY_MS = 250;

export class Chat {
  #api;
  #settings;
  #page;
  #messages = [];
  #views = [];
  #running = null; // the AbortController of the answer that is coming
  #saveTimer = 0;

  /**
   * `page` is the rest of the page: `list` (an element), `follower`, `askKey(message)` → whether one was given,
   * `changed()` after each change of `running` or `isEmpty`, `announce(text)` to those who can't see the page, and
   * `warn(text)`.
   */
  constructor(api, settings, page) {
    this.#api = api;
    this.#settings = settings;
    this.#page = page;
  }

  /** Shows the conversation that was kept, and keeps what comes. */
  open() {
    this.#replace(loadMessages("messages"));
    addEventListener("pagehide", () => this.running && this.#save());
  }

  get running() {
    return this.#running !== null;
  }

  get isEmpty() {
    return this.#messages.length === 0;
  }

  /** Whether there is a conversation that `restore` would bring back. */
  get hasPrevious() {
    return load("previous") !== null;
  }

  async send(content) {
    if (this.running) return;
    this.#add(newMessage("user", content));
    await this.#answer();
  }

  stop() {
    this.#running?.abort();
  }

  /** Answers the last question again. */
  async regenerate() {
    if (this.running) return;
    if (this.#messages.at(-1)?.role === "assistant") this.#truncate(this.#messages.length - 1);
    if (!this.isEmpty) await this.#answer();
  }

  /** Begins a new conversation. The old one can be brought back until there is another one. */
  clear() {
    this.stop();
    this.#setRunning(null);
    if (!this.isEmpty) save("previous", this.#messages);
    this.#replace([]);
    this.#save();
  }

  restore() {
    if (!this.isEmpty) return;
    this.#replace(loadMessages("previous"));
    save("previous", null);
    this.#save();
  }

  #replace(messages) {
    this.#truncate(0);
    for (const message of messages) this.#add(message).finish?.(message);
    this.#page.changed();
    this.#page.follower.jump();
  }

  #add(message) {
    const view = message.role === "user" ? this.#questionView(message) : this.#answerView(message);
    this.#messages.push(message);
    this.#views.push(view);
    this.#page.list.append(view.element);
    return view;
  }

  #questionView(message) {
    const onEdit = (content) => {
      if (this.running) return;
      this.#truncate(this.#messages.indexOf(message));
      this.send(content);
    };
    return new QuestionView(message, { onEdit });
  }

  #answerView(message) {
    const onRendered = () => this.#page.follower.follow();
    return new AnswerView(message, { onRegenerate: () => this.regenerate(), onRendered });
  }

  #truncate(length) {
    this.#messages = this.#messages.slice(0, length);
    for (const view of this.#views.splice(length)) view.element.remove();
  }

  async #answer() {
    const request = this.#request();
    const message = { ...newMessage("assistant", ""), note: "Stopped." }; // unless it comes to its end
    const view = this.#add(message);
    const controller = new AbortController();
    view.start();
    this.#setRunning(controller);
    this.#save();
    this.#page.follower.jump();
    try {
      await this.#stream(request, message, view, controller.signal);
    } catch (error) {
      message.error = controller.signal.aborted ? "" : error.message;
      if (message.error && !(error instanceof ServerError)) console.error(error);
    }
    if (message.error) message.note = "";
    view.finish(message);
    if (this.#running !== controller) return; // another conversation has begun
    this.#setRunning(null);
    this.#save();
    this.#page.announce(message.error || message.note || "The answer is complete.");
  }

  async #stream(request, message, view, signal) {
    const { figures, model, chunks } = await this.#open(request, view, signal);
    let shown = 0;
    let finishReason = null;
    for await (const { choices, usage } of chunks) {
      const { delta = {}, finish_reason: reason } = choices?.[0] ?? {};
      finishReason = reason ?? finishReason;
      if (usage) figures.usage = usage;
      if (delta.reasoning_content) view.addReasoning(delta.reasoning_content);
      if (delta.content) view.addContent(delta.content);
      message.reasoning += delta.reasoning_content ?? "";
      message.content += delta.content ?? "";
      if (delta.reasoning_content || delta.content) figures.piece();
      message.figures = figures.text(model.max_model_len);
      if (performance.now() < shown + FIGURES_EVERY_MS) continue;
      shown = performance.now();
      view.showFigures(message.figures);
      this.#saveSoon();
    }
    message.note = "";
    if (finishReason === "length") message.note = "The answer has reached its limit of tokens.";
    else if (!message.content && !message.reasoning) message.note = "The model answered with nothing.";
  }

  /** Asks until the server answers: it may have to load its model first, or want a key. */
  async #open(request, view, signal) {
    for (;;) {
      try {
        const [model] = await this.#api.models(signal);
        const figures = new Figures();
        const chunks = await this.#api.chat({ model: model.id, ...request }, signal);
        return { figures, model, chunks };
      } catch (error) {
        if (error.status === 401 && (await this.#page.askKey(error.message))) continue;
        const waits = error.status === 503 && !signal.aborted;
        if (waits && (await this.#api.waitWhileLoading((share) => view.showLoading(share), signal))) continue;
        throw error;
      }
    }
  }

  /** Templates want turns to alternate: after an answer that failed, the questions around it are sent as one. */
  #request() {
    const messages = [];
    if (this.#settings.systemPrompt) messages.push({ role: "system", content: this.#settings.systemPrompt });
    for (const { role, content } of this.#messages) {
      if (content === "") continue;
      const last = messages.at(-1);
      if (last?.role === role) last.content += `\n\n${content}`;
      else messages.push({ role, content });
    }
    return { messages, ...this.#settings.parameters() };
  }

  #setRunning(controller) {
    this.#running = controller;
    this.#page.changed();
  }

  #saveSoon() {
    this.#saveTimer ||= setTimeout(() => this.#save(), SAVE_EVERY_MS);
  }

  #save() {
    clearTimeout(this.#saveTimer);
    this.#saveTimer = 0;
    const saved = save("messages", this.isEmpty ? null : this.#messages);
    this.#page.warn(saved ? "" : "The browser can't store this chat: it will be gone after a reload.");
  }
}

function newMessage(role, content) {
  return { role, content, reasoning: "", figures: "", note: "", error: "" };
}
