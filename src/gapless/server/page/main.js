/** Puts the page together. */

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { isSend } from "./message_view.js";
import { Follower } from "./scroll.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";

const find = (id) => document.getElementById(id);
const composer = find("composer");
const input = find("input");
const panel = find("settings");
const panelButton = find("open-settings");
const keyDialog = find("key-dialog");

const settings = new Settings(find("settings-form"), { onKey: () => status.refresh() });
const api = new Api(() => settings.key);
const status = new Status(api, {
  root: find("status"),
  model: find("model"),
  onUnauthorized: async (message) => (await askKey(message)) && status.refresh(),
});
const follower = new Follower(find("scroller"), find("to-end"));

let asking = null;

/** Asks for an API key, once however many requests were refused. False if none is given. */
function askKey(message) {
  asking ??= new Promise((resolve) => {
    find("key-message").textContent = message;
    keyDialog.returnValue = "";
    keyDialog.showModal();
    keyDialog.addEventListener("close", () => resolve(keyDialog.returnValue === "given"), { once: true });
  }).finally(() => (asking = null));
  return asking;
}

function showState() {
  document.body.classList.toggle("running", chat.running);
  find("stop").hidden = !chat.running;
  find("send").hidden = chat.running;
  find("send").disabled = input.value.trim() === "";
  find("welcome").hidden = !chat.isEmpty;
  find("restore").hidden = !chat.hasPrevious;
  find("new-chat").disabled = chat.isEmpty;
}

function togglePanel(open) {
  panel.hidden = !open;
  panelButton.setAttribute("aria-expanded", String(open));
  (open ? panel.querySelector("textarea") : panelButton).focus();
}

/** The text field is as high as its text, within the limits of the style sheet. */
function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + input.offsetHeight - input.clientHeight}px`;
}

function send() {
  const content = input.value.trim();
  if (content === "" || chat.running) return;
  input.value = "";
  fitInput();
  chat.send(content);
}

const chat = new Chat(api, settings, {
  list: find("messages"),
  follower,
  askKey,
  changed: showState,
  announce: (text) => (find("announcer").textContent = text),
  warn: (text) => (find("warning").textContent = text),
});

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("input", () => {
  fitInput();
  showState();
});
input.addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  send();
});
find("stop").addEventListener("click", () => {
  chat.stop();
  input.focus();
});
find("new-chat").addEventListener("click", () => {
  chat.clear();
  input.focus();
});
find("restore").addEventListener("click", () => {
  chat.restore();
  input.focus();
});
panelButton.addEventListener("click", () => togglePanel(panel.hidden));
find("close-settings").addEventListener("click", () => togglePanel(false));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || keyDialog.open) return;
  if (chat.running) chat.stop();
  else if (!panel.hidden) togglePanel(false);
});
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  settings.key = find("key").value;
  find("key").value = "";
  keyDialog.close("given");
});
find("key-cancel").addEventListener("click", () => keyDialog.close(""));

chat.open();
status.refresh();
if (matchMedia("(hover: hover)").matches) input.focus(); // on a phone the keyboard would cover the page
