/** Markdown → elements, made one by one and filled through text nodes, so that nothing in an answer is markup. */

import { copyButton, element, fragment } from "./dom.js";
import { parseBlocks } from "./markdown_blocks.js";
import { parseInline } from "./markdown_inline.js";

/** Emphasis inside emphasis; deeper ones are shown without it, so that no answer makes the document too deep. */
const MAX_NESTING = 16;

/** Shows a text that grows. Finished blocks are left alone; only what may still change is made again. */
export class MarkdownView {
  #root;
  #tail = ""; // what may still change
  #open = []; // the blocks of the tail as they are shown: {source, element}

  constructor(root) {
    this.#root = root;
  }

  /** Takes more text; `render` shows it. */
  append(text) {
    this.#tail += text.replaceAll("\r", "");
  }

  render() {
    const blocks = parseBlocks(this.#tail);
    const sources = blocks.map(({ start }, i) => this.#tail.slice(start, blocks[i + 1]?.start));
    const shown = blocks.map((block, i) => this.#show(block, sources[i], this.#open[i]));
    for (const { element: old } of this.#open.slice(shown.length)) old.remove();
    const numFinal = numFinalBlocks(sources);
    this.#open = shown.slice(numFinal);
    this.#tail = this.#tail.slice(blocks[numFinal]?.start ?? 0);
  }

  #show(block, source, old) {
    if (old?.source === source) return old;
    if (old && updateCode(old.element, block)) return { source, element: old.element };
    const made = blockElement(block);
    if (old) old.element.replaceWith(made);
    else this.#root.append(made);
    return { source, element: made };
  }
}

/** Shows a text that is complete. */
export function renderMarkdown(root, text) {
  const view = new MarkdownView(root);
  view.append(text);
  view.render();
}

/**
 * How many blocks can't change any more when text is added at the end. A block's beginning is certain once its first
 * line and the one after it are complete; with it the end of the block before.
 */
function numFinalBlocks(sources) {
  let newlines = 0;
  for (let i = sources.length - 1; i > 0; i--) {
    newlines += sources[i].split("\n", 3).length - 1;
    if (newlines >= 2) return i;
  }
  return 0;
}

function blockElement(block) {
  switch (block.type) {
    case "paragraph":
      return inline("p", block.text);
    case "heading":
      return inline(`h${Math.min(block.level + 2, 6)}`, block.text); // the page has levels 1 and 2
    case "code":
      return codeElement(block);
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", { dir: "auto" }, fragment(block.blocks.map(blockElement)));
    case "list":
      return listElement(block);
    default:
      return tableElement(block);
  }
}

function inline(tag, text, options) {
  return element(tag, { dir: "auto" }, inlineFragment(text, options));
}

function inlineFragment(text, options) {
  const path = [fragment([])];
  for (const token of parseInline(text, options)) {
    const parent = path[path.length - 1];
    if (token.open) {
      const child = path.length > MAX_NESTING ? parent : openedElement(token);
      if (child !== parent) parent.append(child);
      path.push(child);
    } else if (token.close) path.pop();
    else parent.append(inlineNode(token));
  }
  return path[0];
}

function openedElement({ open, href }) {
  return open === "a" ? linkElement(href) : element(open);
}

function inlineNode(token) {
  if (token.link) {
    const link = linkElement(token.link);
    link.append(token.text);
    return link;
  }
  if (token.code !== undefined) return element("code", { dir: "ltr" }, token.code);
  if (token.math) return element("span", { class: "math", dir: "ltr" }, token.math);
  return token.break ? element("br") : document.createTextNode(token.text);
}

/** `href` comes from safeAddress. The title shows where the link really leads. */
function linkElement(href) {
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function codeElement({ language, text }) {
  const code = element("code", {}, document.createTextNode(text));
  return element(
    "div",
    { class: "code", dir: "ltr", dataset: { language } },
    element("div", { class: "code-bar" }, element("span", {}, language || "text"), copyButton(() => code.textContent)),
    element("pre", { tabIndex: 0, "aria-label": language ? `Code, ${language}` : "Code" }, code),
  );
}

/** Long code grows by what is new, and keeps the reader's selection. False where it is another kind of block. */
function updateCode(old, block) {
  if (block.type !== "code" || !old.matches(".code") || old.dataset.language !== block.language) return false;
  const shown = old.querySelector("pre code").firstChild;
  if (block.text.startsWith(shown.data)) shown.appendData(block.text.slice(shown.data.length));
  else shown.data = block.text;
  return true;
}

function listElement({ first, loose, items }) {
  const content = fragment(items.map((blocks) => itemElement(blocks, loose)));
  return first === null ? element("ul", { dir: "auto" }, content) : element("ol", { dir: "auto", start: first }, content);
}

function itemElement(blocks, loose) {
  const item = element("li");
  let [head, ...rest] = blocks;
  const box = head?.type === "paragraph" ? /^\[([ xX])\](?=\s|$)/.exec(head.text) : null;
  if (box) {
    item.className = "task";
    head = { ...head, text: (box[1] === " " ? "☐" : "☑") + head.text.slice(box[0].length) };
  }
  if (head?.type === "paragraph" && !loose) item.append(inlineFragment(head.text));
  else if (head) item.append(blockElement(head));
  item.append(fragment(rest.map(blockElement)));
  return item;
}

function tableElement({ alignments, header, rows }) {
  const row = (cells, tag) => {
    const shown = cells.map((text) => inline(tag, text, { lineBreaks: true }));
    shown.forEach((cell, i) => (cell.className = alignments[i]));
    return element("tr", {}, fragment(shown));
  };
  const body = element("tbody", {}, fragment(rows.map((cells) => row(cells, "td"))));
  const table = element("table", { dir: "auto" }, element("thead", {}, row(header, "th")), body);
  return element("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, table);
}
