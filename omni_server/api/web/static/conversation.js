// The tab with the hands-free conversation.

import { ApiError, describeModel } from "./api.js";
import { withKey } from "./key_dialog.js";
import { LiveConversation } from "./live_conversation.js";
import { MicrophoneError } from "./microphone.js";
import { copyOf, element, show } from "./page.js";
import { silence, unlockAudio } from "./playback.js";
import { served } from "./served.js";
import { settings } from "./settings.js";
import { watchTabs } from "./tabs.js";
import { voiceOf } from "./voices.js";

/** By state: what it is called, and what there is to do. */
const STATES = {
  ready: ["Ready", "Start, then just talk. Speak while an answer is heard to interrupt it."],
  connecting: ["Connecting", "If the browser asks for the microphone, allow it."],
  listening: ["Listening", "Say something."],
  hearing: ["You are speaking", "Pause when you have finished."],
  thinking: ["Thinking", "The answer is on its way."],
  speaking: ["Speaking", "Speak to interrupt."],
  stopped: ["Stopped", "The microphone is off."],
};
const NOT_UNDERSTOOD =
  "This model does not understand speech: it cannot answer what you say. Ask it in the chat.";
const SCROLL_MARGIN_PX = 80;

/** The conversation that goes on; null if there is none. */
let live = null;

const view = {
  state(name) {
    const panel = element("conversation");
    if (panel.dataset.state === name) return;
    const [title, hint] = STATES[name];
    panel.dataset.state = name;
    element("talk-state").textContent = title;
    element("talk-hint").textContent = hint;
    element("talk-interrupt").disabled = name !== "thinking" && name !== "speaking";
    if (name !== "hearing") element("talk-orb").style.setProperty("--level", "0");
  },
  level(loudness) {
    const isHeard = ["listening", "hearing"].includes(element("conversation").dataset.state);
    element("talk-orb").style.setProperty("--level", isHeard ? loudness.toFixed(2) : "0");
  },
  userTurn(itemId) {
    show("talk-problem", "");
    turnOf(itemId, "user").classList.add("unwritten");
  },
  userText(itemId, text) {
    const turn = turnOf(itemId, "user");
    turn.classList.toggle("unwritten", text.trim() === "");
    turn.querySelector(".text").textContent = text.trim() || "(spoken)";
  },
  answerText(itemId, text) {
    const shown = turnOf(itemId, "assistant").querySelector(".text");
    shown.append(shown.textContent === "" ? text.trimStart() : text);
    scroll();
  },
  cutShort(itemId) {
    const turn = findTurn(itemId);
    if (turn) turn.querySelector(".note").hidden = false;
  },
  problem: (text) => show("talk-problem", text),
  ended(reason) {
    finish();
    if (reason !== null) show("talk-problem", reason);
  },
};

function findTurn(itemId) {
  return [...element("talk-turns").children].find((turn) => turn.dataset.item === itemId);
}

/** The line of what was said, which is added where there is none yet. */
function turnOf(itemId, role) {
  const found = findTurn(itemId);
  if (found) return found;
  const turn = copyOf("talk-turn");
  turn.dataset.item = itemId;
  turn.classList.add(role);
  turn.querySelector(".speaker").textContent = role === "user" ? "You" : "Answer";
  if (role === "user") turn.querySelector(".text").textContent = "(spoken)";
  element("talk-turns").append(turn);
  element("talk-box").hidden = false;
  scroll(true);
  return turn;
}

/** Keeps the end in view, unless the reader has scrolled up. */
function scroll(isNew = false) {
  const box = element("talk-box");
  const distance = box.scrollHeight - box.scrollTop - box.clientHeight;
  if (isNew || distance < SCROLL_MARGIN_PX) box.scrollTop = box.scrollHeight;
}

async function start() {
  silence();
  unlockAudio();
  show("talk-problem", "");
  element("talk-turns").replaceChildren();
  element("talk-box").hidden = true;
  const own = new LiveConversation(view);
  live = own;
  toggle(true);
  view.state("connecting");
  try {
    // Asks for a missing key, and says what is wrong where the WebSocket could not.
    const model = await withKey(describeModel);
    if (live === own) await own.start(model.id, session(model));
  } catch (error) {
    if (!(error instanceof ApiError || error instanceof MicrophoneError)) throw error;
    if (live !== own) return;
    finish();
    show("talk-problem", error.message);
  }
}

function stop() {
  live?.stop();
}

function finish() {
  live = null;
  view.state("stopped");
  toggle(false);
}

/** One button starts and stops, so that the focus stays where it is. */
function toggle(isOn) {
  element("talk-toggle").textContent = isOn ? "Stop" : "Start";
  element("talk-toggle").classList.toggle("primary", !isOn);
  element("talk-toggle").classList.toggle("quiet", isOn);
  element("talk-interrupt").hidden = !isOn;
}

/** The session object of the API, as the settings want it. */
function session(model) {
  const { instructions, maxTokens, writesDown } = settings.get();
  return {
    instructions,
    max_output_tokens: maxTokens ?? "inf",
    audio: { input: { transcription: writesDown && model.hearsSpeech ? {} : null }, output: { voice: voiceOf(model) } },
  };
}

element("talk-toggle").addEventListener("click", () => (live ? stop() : start()));
element("talk-interrupt").addEventListener("click", () => live?.interrupt());
element("writes-down").addEventListener("change", () =>
  settings.change({ writesDown: element("writes-down").checked }),
);
settings.watch(({ writesDown }) => {
  element("writes-down").checked = writesDown;
  if (live) live.configure(session(served.model));
});
served.watch(() => {
  element("talk-toggle").disabled = served.model === null;
  if (served.model?.hearsSpeech === false) show("talk-problem", NOT_UNDERSTOOD);
});
// Nobody should be heard by a tab that is not seen.
watchTabs((name) => {
  if (name !== "conversation") stop();
});
view.state("ready");
