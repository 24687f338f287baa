/** What outlives a reload, in the browser's local storage, which may be full, forbidden, or hold anything. */

const PREFIX = "gapless.";

/** The stored value, or null if there is none that can be read. */
export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

/** False if it could not be stored. Null forgets. */
export function save(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** The stored messages that are what they should be; an answer that was still running counts as stopped. */
export function loadMessages(name) {
  const stored = load(name);
  return Array.isArray(stored) ? stored.filter(isMessage).map(cleanMessage) : [];
}

function isMessage(value) {
  return (value?.role === "user" || value?.role === "assistant") && typeof value.content === "string";
}

function cleanMessage({ role, content, reasoning, figures, note, error }) {
  const text = (value) => (typeof value === "string" ? value : "");
  return { role, content, reasoning: text(reasoning), figures: text(figures), note: text(note), error: text(error) };
}
