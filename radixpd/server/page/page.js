// The page's main: what the model is, the buttons, the key, and the sign of life.

import { askJson, keepKey } from "./api.js";
import { CacheView } from "./cache.js";
import { Chat } from "./chat.js";
import { byId } from "./elements.js";

const HEALTH_EVERY = 5000; // milliseconds

const cache = new CacheView(() => askKey("admin", ""));
let chat = null;

/** Ask for a key and start again with it. */
function askKey(kind, reason) {
  const dialog = byId("key-dialog");
  byId("key-title").textContent = kind === "admin" ? "An admin key" : "This server needs an API key";
  byId("key-reason").textContent = reason;
  byId("key").value = "";
  dialog.onclose = () => {
    const key = byId("key").value;
    byId("key").value = "";
    if (dialog.returnValue !== "key" || !key) return;
    keepKey(kind, key);
    if (kind === "admin") cache.start();
    else open();
  };
  dialog.returnValue = "";
  dialog.showModal();
}

/** Learn what is served; then the page works. */
async function open() {
  try {
    const model = await askJson("get_model_info");
    byId("model").textContent = model.served_model_name;
    document.title = `${model.served_model_name} · radixpd`;
    byId("no-template").hidden = model.has_chat_template;
    byId("system-field").hidden = !model.has_chat_template;
    chat = new Chat(model, (ids) => cache.follow(ids));
    cache.start();
  } catch (error) {
    if (error.status === 401) askKey("api", error.message);
    else setTimeout(open, HEALTH_EVERY);
  }
}

async function watchHealth() {
  const status = byId("status");
  if (document.visibilityState === "visible") {
    try {
      // 503 is an answer too: it says why.
      const answer = await fetch("health", { cache: "no-store" });
      status.textContent = status.dataset.state = (await answer.json()).status;
    } catch {
      status.textContent = "no connection";
      status.dataset.state = "gone";
    }
  }
  setTimeout(watchHealth, HEALTH_EVERY);
}

async function send() {
  const input = byId("input");
  const text = input.value;
  if (!chat) open(); // somebody has closed the question for a key
  if (!chat || chat.running || !text.trim()) return;
  input.value = "";
  const mine = chat;
  busy(true);
  try {
    await mine.send(text);
  } finally {
    busy(Boolean(chat.running));
    // What was refused goes back to where it can be changed.
    if (mine.turns.at(-1)?.failed && !input.value) input.value = text;
  }
}

function busy(running) {
  // The focus goes with the button that has it.
  const focused = document.activeElement;
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  if (focused === byId("send")) byId("stop").focus();
  if (focused === byId("stop")) byId("input").focus();
}

function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === view));
  }
  cache.start();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open) chat?.stop();
});
byId("stop").addEventListener("click", () => chat.stop());
byId("new").addEventListener("click", () => {
  chat?.clear();
  busy(false);
  byId("input").focus();
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
for (const button of document.querySelectorAll("[data-show]")) button.addEventListener("click", () => show(button.dataset.show));

open();
watchHealth();
