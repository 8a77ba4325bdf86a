// The chat: asks, shows the answers, and takes them up again after a reload.

import { Answer } from "./answer.js";
import { ApiError } from "./api.js";
import { chatStore } from "./chat_store.js";
import { composer, notify } from "./composer.js";
import { withKey } from "./key_dialog.js";
import { Messages } from "./messages.js";
import { announce, element } from "./page.js";
import { silence, unlockAudio } from "./playback.js";
import { served } from "./served.js";
import { settings } from "./settings.js";
import { TurnView } from "./turn_view.js";
import { voiceOf } from "./voices.js";

let chat = emptyChat();
/** The answer that is being made or played. */
let current = null;

/** `saved` is what chat_store.js keeps of it. */
function emptyChat() {
  const id = crypto.getRandomValues(new Uint32Array(3)).join("-");
  return { messages: new Messages(), saved: { id, turns: [] } };
}

export async function ask(text, media) {
  stop();
  silence();
  unlockAudio();
  notify("");
  showWelcome(false);
  const own = chat;
  const view = new TurnView({ text, attachments: media }, element("turns"));
  const answer = new Answer(view);
  const turn = own.messages.ask(text, media, answer);
  setCurrent(answer);
  announce("Waiting for the answer");
  try {
    const isSpoken = await withKey(() => runWithinLimits(answer, own.messages));
    view.complete();
    if (answer.stopped) view.note("Stopped.");
    announce(answer.stopped ? "Stopped" : isSpoken ? "The answer is complete" : answer.text);
    keep(own, text, media, answer);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    own.messages.drop(turn);
    view.complete();
    view.fail(error.message, () => {
      view.withoutRetry();
      ask(text, media);
    });
    announce(`The answer failed: ${error.message}`);
    served.doubt(error);
  }
  await answer.played();
  view.end();
  if (current === answer) setCurrent(null);
}

/**
 * Leaves the media of early questions out where the server takes no more of them in one prompt. Resolves to whether
 * the answer is spoken.
 */
async function runWithinLimits(answer, messages) {
  for (;;) {
    const body = chatBody(served.model, messages);
    try {
      await answer.run(body);
      return "audio" in body;
    } catch (error) {
      if (error.code !== "too_many_media" || !messages.forgetOldestMedia()) throw error;
    }
  }
}

/** Ends the answer that is being made or played; true if there was one. */
export function stop() {
  const answer = current;
  setCurrent(null);
  answer?.stop();
  return answer !== null;
}

/** The body of a request for an answer, as the settings want it. `messages` is a `Messages`. */
function chatBody(model, messages) {
  const { instructions, temperature, maxTokens, speaks } = settings.get();
  const voice = speaks ? voiceOf(model) : null;
  return {
    model: model.id,
    messages: messages.list(instructions),
    ...(voice === null
      ? { modalities: ["text"] }
      : { modalities: ["text", "audio"], audio: { voice, format: "pcm16" } }),
    ...(temperature === null ? {} : { temperature }),
    ...(maxTokens === null ? {} : { max_completion_tokens: maxTokens }),
  };
}

function setCurrent(answer) {
  current = answer;
  composer.setAnswering(answer !== null);
}

function keep({ saved }, question, attachments, { text }) {
  if (text === "") return;
  saved.turns.push({ question, media: attachments.map(({ kind, name }) => ({ kind, name })), answer: text });
  chatStore.save(saved);
  if (chat.saved === saved) chatStore.openId = saved.id;
  updateTools();
}

// --- one chat or another
// ------------------------------------------------------------------------------------------

export function startNewChat() {
  clear();
  chat = emptyChat();
  chatStore.openId = null;
  showWelcome(true);
  composer.focus();
}

/** Shows a chat of chat_store.js, to go on with it. */
export function openChat(saved) {
  clear();
  chat = { messages: new Messages(), saved: { ...saved, turns: [...saved.turns] } };
  chatStore.openId = saved.id;
  for (const turn of saved.turns) {
    chat.messages.restore(turn);
    new TurnView({ text: turn.question, attachments: turn.media }, element("turns")).restore(turn.answer);
  }
  showWelcome(false);
  element("restored").hidden = false;
}

function clear() {
  stop();
  silence();
  notify("");
  for (const shown of element("turns").querySelectorAll("img, video")) URL.revokeObjectURL(shown.src);
  element("turns").replaceChildren();
  element("restored").hidden = true;
}

function showWelcome(isShown) {
  element("welcome").hidden = !isShown;
  updateTools();
}

export function updateTools() {
  element("new-button").hidden = !element("welcome").hidden;
  element("history-button").hidden = chatStore.list().length === 0;
  element("chat-tools").hidden = element("new-button").hidden && element("history-button").hidden;
}

composer.start(ask, () => {
  stop();
  silence();
});
element("stop").addEventListener("click", stop);
element("new-button").addEventListener("click", startNewChat);

const reloaded = chatStore.list().find(({ id }) => id === chatStore.openId);
if (reloaded) openChat(reloaded);
else updateTools();
