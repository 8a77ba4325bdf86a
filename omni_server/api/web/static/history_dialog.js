// The list of earlier chats: opens one again, forgets one or all.

import { openChat, startNewChat, updateTools } from "./chat.js";
import { chatStore } from "./chat_store.js";
import { copyOf, element } from "./page.js";

const dates = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

function showList() {
  const chats = chatStore.list();
  element("history-list").replaceChildren(...chats.map(entry));
  element("history-empty").hidden = chats.length > 0;
  element("history-clear").disabled = chats.length === 0;
  updateTools();
}

function entry(chat) {
  const item = copyOf("history");
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
