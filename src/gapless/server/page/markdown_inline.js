/**
 * The text of a block → a flat list of tokens: {text}, {link, text}, {code}, {math}, {break}, {open, href?} and
 * {close}. `open` and `close` nest. Nothing here touches the document, and the time that it takes grows with the text's
 * length only.
 */

const SPECIAL = /[\\`*_[\]!<\n]|~~|\$\$|https?:\/\//g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const BARE_LINK = /https?:\/\/[^\s<>"`|。，、；！？）」』】]{1,2000}/y;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const LINE_BREAK = /<br ?\/?>/iy;

/** Longer addresses are not taken for links: looking for their ends again and again would take long. */
const MAX_ADDRESS = 2000;

/** How far back the start of an emphasis is looked for, among other marks that are still open. */
const MAX_OPEN_MARKS = 64;

/** The address if it may be a link: a whole http, https or mailto address. Null for javascript:, data:, /path … */
export function safeAddress(address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

/** `lineBreaks`: "<br>" breaks a line, as it must in a table's cell, which has no other way. */
export function parseInline(text, { lineBreaks = false } = {}) {
  return new InlineParser(text, lineBreaks).parse();
}

class InlineParser {
  #text;
  #lineBreaks;
  #at = 0;
  #tokens = [];
  #marks = []; // runs of *, _ and ~~ that have not been matched yet
  #brackets = []; // [ and ![ that may start a link
  #missing = new Set(); // closing marks that do not come any more

  constructor(text, lineBreaks) {
    this.#text = text;
    this.#lineBreaks = lineBreaks;
  }

  parse() {
    while (this.#at < this.#text.length) {
      SPECIAL.lastIndex = this.#at;
      const match = SPECIAL.exec(this.#text);
      const next = match === null ? this.#text.length : match.index;
      this.#take(next - this.#at);
      if (match !== null) this.#special(match[0]);
    }
    matchMarks(this.#marks);
    return this.#tokens.flatMap(flatten);
  }

  #special(mark) {
    if (mark === "\n") this.#add({ break: true }, 1);
    else if (mark === "\\") this.#backslash();
    else if (mark === "`") this.#code();
    else if (mark === "$$") this.#verbatim("$$", "$$") || this.#take(2);
    else if (mark === "*" || mark === "_" || mark === "~~") this.#mark(mark[0]);
    else if (mark === "[" || mark === "!") this.#openBracket(mark);
    else if (mark === "]") this.#closeBracket();
    else if (mark === "<") this.#angle();
    else this.#bareLink();
  }

  /** The next `length` characters are text. */
  #take(length) {
    if (length > 0) this.#add({ text: this.#text.slice(this.#at, this.#at + length) }, length);
  }

  #add(token, length) {
    this.#tokens.push(token);
    this.#at += length;
  }

  #backslash() {
    const next = this.#text[this.#at + 1] ?? "";
    if (next === "\n") this.#add({ break: true }, 2);
    else if (next === "(") this.#verbatim("\\(", "\\)") || this.#take(2);
    else if (next === "[") this.#verbatim("\\[", "\\]") || this.#take(2);
    else if (PUNCTUATION.test(next)) this.#add({ text: next }, 2);
    else this.#take(1);
  }

  /** Mathematics is shown as it was written; its stars and underscores are not emphasis. */
  #verbatim(opening, closing) {
    const end = this.#find(closing, this.#at + opening.length);
    if (end < 0) return false;
    const length = end + closing.length - this.#at;
    this.#add({ math: this.#text.slice(this.#at, this.#at + length) }, length);
    return true;
  }

  /** indexOf that looks only once for what is not there. */
  #find(needle, from) {
    if (this.#missing.has(needle)) return -1;
    const found = this.#text.indexOf(needle, from);
    if (found < 0) this.#missing.add(needle);
    return found;
  }

  #code() {
    const run = this.#runLength("`");
    const key = `code ${run}`;
    const content = this.#at + run;
    let at = content;
    while (!this.#missing.has(key)) {
      const start = this.#text.indexOf("`", at);
      if (start < 0) {
        this.#missing.add(key);
        break;
      }
      at = start;
      while (this.#text[at] === "`") at++;
      if (at - start === run) {
        this.#add({ code: codeText(this.#text.slice(content, start)) }, at - this.#at);
        return;
      }
    }
    this.#take(run);
  }

  #runLength(character) {
    let end = this.#at;
    while (this.#text[end] === character) end++;
    return end - this.#at;
  }

  #mark(character) {
    const run = this.#runLength(character);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + run] ?? " ";
    // More generous than CommonMark beside punctuation, for languages that write no spaces around it.
    let canOpen = after.trim() !== "";
    let canClose = before.trim() !== "";
    if (character === "_") {
      canOpen &&= !WORD.test(before);
      canClose &&= !WORD.test(after);
    }
    if (character === "~" && run !== 2) return this.#take(run);
    const mark = { character, run, left: run, canOpen, canClose, opens: [], closes: 0 };
    this.#marks.push(mark);
    this.#add({ mark }, run);
  }

  #openBracket(mark) {
    const image = mark === "!";
    if (image && this.#text[this.#at + 1] !== "[") return this.#take(1);
    this.#brackets.push({ at: this.#at, index: this.#tokens.length, numMarks: this.#marks.length, image });
    this.#take(image ? 2 : 1);
  }

  #closeBracket() {
    const bracket = this.#brackets.pop();
    const target = bracket && this.#text[this.#at + 1] === "(" ? readTarget(this.#text, this.#at + 2) : null;
    const href = target && safeAddress(target.address);
    if (!href) return this.#take(1);
    const marks = this.#marks.splice(bracket.numMarks);
    const inside = this.#tokens.splice(bracket.index).slice(1);
    if (bracket.image) {
      // Pictures are never fetched: that would tell others that they are looked at. They become links.
      this.#tokens.push({ link: href, text: this.#text.slice(bracket.at + 2, this.#at) || href });
    } else {
      matchMarks(marks);
      for (const token of inside) delete token.link; // no link inside a link
      this.#tokens = this.#tokens.concat({ open: "a", href }, inside, { close: true });
      this.#brackets = [];
    }
    this.#at = target.end;
  }

  #angle() {
    ANGLE_LINK.lastIndex = LINE_BREAK.lastIndex = this.#at;
    const link = ANGLE_LINK.exec(this.#text);
    const lineBreak = this.#lineBreaks ? LINE_BREAK.exec(this.#text) : null;
    if (lineBreak) this.#add({ break: true }, lineBreak[0].length);
    else if (!link || !this.#link(link[1], link[0].length)) this.#take(1);
  }

  #bareLink() {
    BARE_LINK.lastIndex = this.#at;
    const match = BARE_LINK.exec(this.#text);
    const address = match === null ? "" : withoutTrailing(match[0]);
    if (!this.#link(address, address.length)) this.#take("http".length);
  }

  #link(address, length) {
    const href = safeAddress(address);
    if (href === null) return false;
    this.#add({ link: href, text: address }, length);
    return true;
  }
}

/** Pairs the marks of emphasis, as in CommonMark's "process emphasis". Changes `opens` and `closes` of the marks. */
function matchMarks(marks) {
  const open = [];
  for (const closer of marks) {
    while (closer.canClose && closer.left > 0) {
      const at = findOpener(open, closer);
      if (at < 0) break;
      const opener = open[at];
      const used = opener.left >= 2 && closer.left >= 2 ? 2 : 1;
      const tag = closer.character === "~" ? "del" : used === 2 ? "strong" : "em";
      opener.opens.unshift(tag);
      closer.closes++;
      opener.left -= used;
      closer.left -= used;
      open.length = opener.left > 0 ? at + 1 : at;
    }
    if (closer.canOpen && closer.left > 0) open.push(closer);
  }
}

function findOpener(open, closer) {
  for (let at = open.length - 1; at >= Math.max(0, open.length - MAX_OPEN_MARKS); at--) {
    const opener = open[at];
    if (opener.character !== closer.character) continue;
    // "**2*3**" is one bold text: a mark within a word does not pair with one of another length.
    const within = opener.canClose || closer.canOpen;
    if (within && (opener.run + closer.run) % 3 === 0 && (opener.run % 3 !== 0 || closer.run % 3 !== 0)) continue;
    return at;
  }
  return -1;
}

/** A token as it is handed out; a run of marks becomes what it closes, what is left of it, and what it opens. */
function flatten(token) {
  if (token.mark === undefined) return token.text === "" ? [] : [token];
  const { character, left, opens, closes } = token.mark;
  const rest = left > 0 ? [{ text: character.repeat(left) }] : [];
  return [...Array(closes).fill({ close: true }), ...rest, ...opens.map((open) => ({ open }))];
}

function codeText(content) {
  const text = content.replaceAll("\n", " ");
  const padded = text.startsWith(" ") && text.endsWith(" ") && text.trim() !== "";
  return padded ? text.slice(1, -1) : text;
}

/** What stands between "](" and ")": an address and perhaps a title, or null. `end` is behind the ")". */
function readTarget(text, from) {
  let at = from;
  while (text[at] === " ") at++;
  const angled = text[at] === "<";
  if (angled) at++;
  const start = at;
  for (let depth = 0; ; at++) {
    const character = text[at];
    if (character === undefined || character === "\n" || at - start > MAX_ADDRESS) return null;
    if (angled ? character === ">" : character === " ") break;
    if (!angled && character === "(") depth++;
    if (!angled && character === ")" && depth-- === 0) break;
  }
  const address = text.slice(start, at).replace(/\\([!-/:-@[-`{-~])/g, "$1");
  if (angled) at++;
  const rest = /[ ]{0,9}(?:"[^"\n]{0,500}"|'[^'\n]{0,500}')?[ ]{0,9}\)/y;
  rest.lastIndex = at;
  const match = rest.exec(text);
  return match === null ? null : { address, end: at + match[0].length };
}

/** A bare address without the punctuation that belongs to the sentence around it. */
function withoutTrailing(address) {
  let end = address.length;
  let unclosed = 0;
  for (const character of address) unclosed += character === "(" ? 1 : character === ")" ? -1 : 0;
  for (; end > 0; end--) {
    const last = address[end - 1];
    if (last === ")" && unclosed < 0) unclosed++;
    else if (!".,;:!?'*_~]".includes(last)) break;
  }
  return address.slice(0, end);
}
