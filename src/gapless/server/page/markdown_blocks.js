/**
 * Markdown text → blocks, line by line. Nothing here touches the document.
 *
 * The dialect is CommonMark with tables, as models write it. HTML is text; "---" under a paragraph is a rule, not a
 * heading; there are no link definitions. A line decides by itself, or with the one after it, whether a block
 * starts there, so what has been parsed stays parsed when more text arrives (markdown.js relies on it).
 */

/** Quotes and lists inside each other; deeper ones stay text, so that no answer can exhaust the stack. */
const MAX_DEPTH = 12;

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])( +|$)/;
const DELIMITER = /^:?-+:?$/;

/**
 * The blocks of `text`, each with its `type` and with the offset `start` of its first line in `text`:
 * paragraph {text}, heading {level, text}, code {language, text}, rule, quote {blocks},
 * list {first, loose, items: [blocks]} where `first` is null for bullets,
 * table {alignments, header: [text], rows: [[text]]}.
 */
export function parseBlocks(text, depth = 0) {
  return new BlockParser(text, depth).parse();
}

class BlockParser {
  #lines;
  #depth;
  #at = 0;

  constructor(text, depth) {
    this.#lines = text.split("\n");
    this.#depth = depth;
  }

  parse() {
    const blocks = [];
    let start = 0;
    while (this.#at < this.#lines.length) {
      const first = this.#at;
      if (isBlank(this.#lines[first])) this.#at++;
      else blocks.push({ start, ...this.#block() });
      for (let i = first; i < this.#at; i++) start += this.#lines[i].length + 1;
    }
    return blocks;
  }

  /** Reads one block; the line is not blank. */
  #block() {
    const line = this.#line();
    if (indentOf(line) >= 4) return this.#indentedCode();
    const fence = fenceOf(line);
    if (fence) return this.#fencedCode(fence);
    const heading = HEADING.exec(line);
    if (heading) {
      this.#at++;
      return { type: "heading", level: heading[1].length, text: headingText(line.slice(heading[0].length)) };
    }
    if (RULE.test(line)) {
      this.#at++;
      return { type: "rule" };
    }
    if (this.#depth < MAX_DEPTH && QUOTE.test(line)) return this.#quote();
    if (this.#depth < MAX_DEPTH && ITEM.test(line)) return this.#list();
    return this.#table() ?? this.#paragraph();
  }

  #line(at = this.#at) {
    return at < this.#lines.length ? expandTabs(this.#lines[at]) : "";
  }

  #indentedCode() {
    const lines = [];
    let end = 0;
    for (; this.#at + lines.length < this.#lines.length; ) {
      const line = this.#line(this.#at + lines.length);
      if (!isBlank(line) && indentOf(line) < 4) break;
      lines.push(line.slice(4));
      if (!isBlank(line)) end = lines.length;
    }
    this.#at += end;
    return { type: "code", language: "", text: lines.slice(0, end).join("\n") };
  }

  /** Up to the closing fence, or to the end of the text where there is none (yet). */
  #fencedCode({ mark, indent, language }) {
    const lines = [];
    for (this.#at++; this.#at < this.#lines.length; this.#at++) {
      const line = this.#lines[this.#at];
      const fence = FENCE.exec(line);
      if (fence && isBlank(fence[2]) && fence[1][0] === mark[0] && fence[1].length >= mark.length) {
        this.#at++;
        break;
      }
      lines.push(unindent(line, indent));
    }
    return { type: "code", language, text: lines.join("\n") };
  }

  #quote() {
    const lines = [];
    for (let line = this.#line(); QUOTE.test(line); line = this.#line()) {
      lines.push(line.replace(QUOTE, ""));
      this.#at++;
    }
    return { type: "quote", blocks: parseBlocks(lines.join("\n"), this.#depth + 1) };
  }

  #list() {
    const { kind, number } = itemOf(this.#line());
    const items = [];
    let loose = false;
    for (;;) {
      const item = this.#item();
      items.push(item.blocks);
      loose ||= item.loose;
      const next = this.#afterBlanks(); // blank lines belong to a list only when an item follows
      if (itemOf(this.#line(next))?.kind !== kind || RULE.test(this.#line(next))) break;
      loose ||= next > this.#at;
      this.#at = next;
    }
    return { type: "list", first: number, loose, items };
  }

  /** One item: its line, what is indented under it, and lines that go on with its last paragraph. */
  #item() {
    const { indent, width } = itemOf(this.#line());
    const lines = [this.#line().slice(width)];
    this.#at++;
    let blanks = false;
    for (;;) {
      const next = this.#afterBlanks();
      const line = this.#line(next);
      if (isBlank(line)) break;
      // Models often indent by two under "1. ", where three would be right.
      const inside = indentOf(line) >= Math.min(width, indent + 2);
      const goesOn = next === this.#at && !isBlank(lines[lines.length - 1]) && !this.#interrupts(next, true);
      if (!inside && !goesOn) break;
      for (; this.#at < next; this.#at++) lines.push("");
      blanks ||= lines[lines.length - 1] === "" && lines.length > 1;
      lines.push(unindent(line, width));
      this.#at++;
    }
    const blocks = parseBlocks(lines.join("\n"), this.#depth + 1);
    const paragraphs = blocks.filter((block) => block.type === "paragraph").length;
    return { blocks, loose: blanks && paragraphs > 1 };
  }

  #table() {
    const header = this.#tableHeader(this.#at);
    if (header === null) return null;
    const alignments = rowCells(this.#line(this.#at + 1)).map(alignmentOf);
    const rows = [];
    for (this.#at += 2; ; this.#at++) {
      const line = this.#line();
      if (isBlank(line) || !line.includes("|")) break;
      const cells = rowCells(line).slice(0, header.length);
      while (cells.length < header.length) cells.push("");
      rows.push(cells);
    }
    return { type: "table", alignments, header, rows };
  }

  /** The header's cells if a table starts at line `at`, or null. */
  #tableHeader(at) {
    const line = this.#line(at);
    const below = this.#line(at + 1);
    if (!line.includes("|") || !below.includes("-") || !below.includes("|")) return null;
    const header = rowCells(line);
    const delimiters = rowCells(below);
    return delimiters.length === header.length && delimiters.every((cell) => DELIMITER.test(cell)) ? header : null;
  }

  #paragraph() {
    const lines = [];
    do {
      lines.push(this.#line().trim());
      this.#at++;
    } while (!isBlank(this.#line()) && !this.#interrupts(this.#at, false));
    return { type: "paragraph", text: lines.join("\n") };
  }

  /** Whether line `at` starts a block even directly under a paragraph. */
  #interrupts(at, inList) {
    const line = this.#line(at);
    if (indentOf(line) >= 4) return false;
    if (fenceOf(line) || HEADING.test(line) || RULE.test(line)) return true;
    if (this.#tableHeader(at) !== null) return true;
    if (this.#depth >= MAX_DEPTH) return false;
    if (QUOTE.test(line)) return true;
    const item = itemOf(line);
    if (item === null) return false;
    // "in the year\n1984." goes on with its sentence.
    return inList || (!isBlank(line.slice(item.width)) && (item.number === null || item.number === 1));
  }

  #afterBlanks() {
    let at = this.#at;
    while (at < this.#lines.length && isBlank(this.#lines[at])) at++;
    return at;
  }
}

function isBlank(line) {
  return line.trim() === "";
}

function indentOf(line) {
  let indent = 0;
  while (line[indent] === " ") indent++;
  return indent;
}

function expandTabs(line) {
  const indent = /^[ \t]*/.exec(line)[0];
  return indent.includes("\t") ? indent.replaceAll("\t", "    ") + line.slice(indent.length) : line;
}

/** `line` without its first `width` spaces, as far as they are there. */
function unindent(line, width) {
  const expanded = expandTabs(line);
  return expanded.slice(Math.min(width, indentOf(expanded)));
}

function fenceOf(line) {
  const match = FENCE.exec(line);
  if (match === null || (match[1][0] === "`" && match[2].includes("`"))) return null;
  return { mark: match[1], indent: indentOf(line), language: match[2].trim().split(/\s/, 1)[0].slice(0, 40) };
}

/** Where a list item starts: its kind, its number, its indentation, and the width up to its content. */
function itemOf(line) {
  const match = ITEM.exec(line);
  if (match === null) return null;
  const [, indent, mark, number, space] = match;
  const gap = space.length >= 1 && space.length <= 4 ? space.length : 1;
  return {
    kind: mark[mark.length - 1],
    number: number === undefined ? null : Number(number),
    indent: indent.length,
    width: indent.length + mark.length + gap,
  };
}

/** A heading's words without the number signs that may close it. */
function headingText(text) {
  const trimmed = text.trim();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end--;
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trimEnd() : trimmed;
}

/** The cells of a table's line: split at pipes that are not escaped, trimmed. */
function rowCells(line) {
  const cells = [];
  let cell = "";
  const row = line.trim();
  for (let i = row[0] === "|" ? 1 : 0; i < row.length; i++) {
    if (row[i] === "\\" && row[i + 1] === "|") {
      cell += "|";
      i++;
    } else if (row[i] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else {
      cell += row[i];
    }
  }
  if (cell.trim() !== "" || cells.length === 0) cells.push(cell.trim());
  return cells;
}

function alignmentOf(cell) {
  if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "end";
  return "start";
}
