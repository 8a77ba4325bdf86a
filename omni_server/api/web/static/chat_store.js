// Earlier chats: their text, kept in this browser. Audio, pictures and files are not: there is no room for
// them.

const ITEM = "omni-server.history";
/** The chat that this tab shows, so that a reload shows it again. */
const OPEN_ITEM = "omni-server.open-chat";
const MAX_CHATS = 50;
/** Browsers give a page some five million. */
const MAX_CHARACTERS = 1_000_000;

/**
 * A chat is `{id, changed, turns}`, a turn `{question, media, answer}` with `media` as `{kind, name}` of the
 * files. The latest chat comes first.
 */
export const chatStore = {
  list() {
    try {
      return JSON.parse(localStorage.getItem(ITEM)).filter(isChat);
    } catch {
      return []; // nothing yet, or nothing that this page has written
    }
  },

  /** Adds a chat or puts it in the place of its earlier state. The oldest ones make room. */
  save(chat) {
    const kept = [{ ...chat, changed: Date.now() }, ...chatStore.list().filter(({ id }) => id !== chat.id)];
    write(kept.slice(0, MAX_CHATS));
  },

  remove(id) {
    write(chatStore.list().filter((chat) => chat.id !== id));
  },

  clear() {
    write([]);
  },

  get openId() {
    return sessionStorage.getItem(OPEN_ITEM);
  },

  set openId(id) {
    if (id === null) sessionStorage.removeItem(OPEN_ITEM);
    else sessionStorage.setItem(OPEN_ITEM, id);
  },
};

function write(chats) {
  if (chats.length === 0) return localStorage.removeItem(ITEM);
  const text = JSON.stringify(chats);
  try {
    if (text.length > MAX_CHARACTERS) throw new RangeError("larger than what is kept");
    localStorage.setItem(ITEM, text);
  } catch {
    write(shorter(chats));
  }
}

/** Without the oldest chat, or, of the only one, without its oldest turn. */
function shorter(chats) {
  if (chats.length > 1) return chats.slice(0, -1);
  const [{ turns, ...chat }] = chats;
  return turns.length > 1 ? [{ ...chat, turns: turns.slice(1) }] : [];
}

function isChat(chat) {
  const { id, changed, turns } = chat ?? {};
  return (
    typeof id === "string" &&
    Number.isFinite(changed) &&
    Array.isArray(turns) &&
    turns.length > 0 &&
    turns.every(isTurn)
  );
}

function isTurn(turn) {
  const isText = (value) => typeof value === "string";
  const isFile = (file) => isText(file?.kind) && isText(file.name);
  return (
    isText(turn?.question) && isText(turn.answer) && Array.isArray(turn.media) && turn.media.every(isFile)
  );
}
