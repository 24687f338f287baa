/** Small helpers for the document. Text always enters it as text: nothing in this page parses HTML. */

/** A new element with properties or attributes, `onNAME` listeners, and children. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  node.append(...children); // before dir="auto", which would look at the text again with each child
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  return node;
}

/** `nodes`, of which there may be more than a call takes arguments, in one. */
export function fragment(nodes) {
  const made = document.createDocumentFragment();
  for (const node of nodes) made.append(node);
  return made;
}

/** A button that copies what `text()` returns, and says so. */
export function copyButton(text, label = "Copy") {
  const button = element("button", { type: "button", class: "quiet" }, label);
  let timer = 0;
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Can't copy";
    clearTimeout(timer);
    timer = setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed: the old way may be
    }
  }
  // The clipboard's interface is there for https and localhost only; a server in the local network has neither.
  const area = element("textarea", { class: "offscreen", value: text, readOnly: true });
  const focused = document.activeElement;
  (focused?.closest("dialog") ?? document.body).append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

/** "1 token", "1,234 tokens". */
export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}
