// The dialogs of the header: links, settings, earlier chats.

import { openChat, startNewChat, updateTools } from "./chat.js";
import { chatStore } from "./chat_store.js";
import { copyOf, element } from "./page.js";
import { settings } from "./settings.js";

// --- help: the description of the API is not on every server open to everybody
// ------------------------------------------------------------------------------------------

element("help-button").addEventListener("click", async () => {
  element("help-dialog").showModal();
  if (!element("docs-link").href) return;
  const response = await fetch(element("docs-link").href, { method: "HEAD" }).catch(() => null);
  if (response?.ok) return;
  element("docs-link").removeAttribute("href");
  element("docs-help").textContent = "This server does not show it to browsers";
  element("openapi-link").parentElement.hidden = true;
});

// --- settings: each change counts at once
// ------------------------------------------------------------------------------------------

/**
 * Input by id: the setting that it shows, and how its text is read. An empty number leaves the choice to the
 * server.
 */
const FIELDS = {
  instructions: ["instructions", (input) => input.value],
  temperature: ["temperature", numberOf],
  "max-tokens": ["maxTokens", numberOf],
};

function numberOf(input) {
  return input.value.trim() === "" ? null : Number(input.value);
}

for (const [id, [name, read]] of Object.entries(FIELDS)) {
  const input = element(id);
  input.addEventListener("input", () => {
    const isValid = input.checkValidity();
    input.ariaInvalid = String(!isValid);
    if (isValid) settings.change({ [name]: read(input) });
  });
}

function fill() {
  for (const [id, [name]] of Object.entries(FIELDS)) {
    element(id).value = settings.get()[name] ?? "";
    element(id).ariaInvalid = "false";
  }
}

element("settings-button").addEventListener("click", () => {
  fill();
  element("settings-dialog").showModal();
});
element("settings-reset").addEventListener("click", () => {
  settings.reset();
  fill();
});

// --- earlier chats: opens one again, deletes one or all
// ------------------------------------------------------------------------------------------

const dates = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

function showList() {
  const chats = chatStore.list();
  element("history-list").replaceChildren(...chats.map(entry));
  element("history-empty").hidden = chats.length > 0;
  element("history-clear").disabled = chats.length === 0;
  updateTools();
}

function entry(chat) {
  const item = copyOf("entry");
  const title = titleOf(chat);
  item.querySelector(".title").textContent = title;
  item.querySelector(".date").textContent = dates.format(chat.changed);
  item.querySelector(".open").addEventListener("click", () => {
    element("history-dialog").close();
    openChat(chat);
  });
  const remove = item.querySelector(".forget");
  remove.setAttribute("aria-label", `Delete “${title}”`);
  remove.addEventListener("click", () =>
    forget(() => chatStore.remove(chat.id), chatStore.openId === chat.id),
  );
  return item;
}

function titleOf({ turns }) {
  const [{ question, media }] = turns;
  return question || media.map(({ name }) => name).join(", ");
}

function forget(remove, isOpen) {
  remove();
  if (isOpen) startNewChat();
  showList();
  element("history-close").focus();
}

element("history-button").addEventListener("click", () => {
  showList();
  element("history-dialog").showModal();
});
element("history-clear").addEventListener("click", () => forget(chatStore.clear, true));
