// The page: connects the composer, the conversation and the server.

import { Answer } from "./answer.js";
import { ApiError, apiKey, describeModel } from "./api.js";
import { attachmentOf, discard, recordingOf } from "./attachments.js";
import { stopReplay } from "./clip.js";
import { Conversation } from "./conversation.js";
import { askForKey, withKey } from "./key_dialog.js";
import { MicrophoneError } from "./microphone.js";
import { unlockSound } from "./playback.js";
import { Recorder } from "./recorder.js";
import { TurnView, attachmentView } from "./view.js";

const RETRY_MS = 2000;
const element = (id) => document.getElementById(id);

/** What is served; null until the server has said so. */
let model = null;
/** Whether the server takes questions, as far as is known. */
let ready = false;
let connecting = null;
let conversation = new Conversation();
let attachments = [];
/** Files that are being read. */
let numReading = 0;
/** The answer that is being made or played. */
let current = null;

const recorder = new Recorder(async (samples) => {
  if (samples.length === 0) return notify("Nothing was recorded.");
  await send([...takeAttachments(), await recordingOf(samples)]);
});

// --- the server ---------------------------------------------------------------------------------------------------

function connect() {
  connecting ??= askForModel().finally(() => (connecting = null));
}

/** Asks what is served until the server says so. */
async function askForModel() {
  ready = false;
  updateButtons();
  for (;;) {
    try {
      model = await withKey(describeModel);
      ready = true;
      return showModel();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      showState("waiting", error.message);
      if (error.status === 401) return; // the button asks again
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function showModel() {
  showState("ready", model.id);
  const voice = element("voice").value;
  element("voice").replaceChildren(...model.voices.map(({ id, name }) => new Option(name, id, false, id === voice)));
  element("speak-option").hidden = element("voice-option").hidden = model.voices.length === 0;
  const media = ["audio", "image", "video"].filter((kind) => model.inputs.includes(kind));
  element("files").accept = media.map((kind) => `${kind}/*`).join(",");
  element("attach").hidden = media.length === 0;
  element("mic").hidden = element("big-mic").hidden = !media.includes("audio");
  updateButtons();
}

function showState(state, text) {
  element("state").dataset.state = state;
  element("state-text").textContent = text;
  element("state").title = text;
}

// --- asking -------------------------------------------------------------------------------------------------------

async function send(media) {
  const text = element("text").value.trim();
  if (!text && media.length === 0) return;
  element("text").value = "";
  resizeText();
  await ask(text, media);
}

async function ask(text, media) {
  stop();
  stopReplay();
  unlockSound();
  notify("");
  element("welcome").hidden = true;
  element("new-button").hidden = false;
  const ownConversation = conversation;
  const view = new TurnView({ text, attachments: media }, element("turns"));
  const voice = element("speak").checked && model.voices.length > 0 ? element("voice").value : null;
  const answer = new Answer(view, voice);
  const turn = conversation.ask(text, media, answer);
  current = answer;
  updateButtons();
  announce("Waiting for the answer");
  try {
    await withKey(() => runWithinLimits(answer, ownConversation));
    view.complete();
    if (answer.stopped) view.note("Stopped.");
    announce(answer.stopped ? "Stopped" : voice ? "The answer is complete" : answer.text);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    ownConversation.drop(turn);
    view.complete();
    view.fail(error.message, () => {
      view.withoutRetry();
      ask(text, media);
    });
    announce(`The answer failed: ${error.message}`);
    // Another model may be served by now, or none. Whoever would not give a key is not asked again at once.
    if (error.status !== 400 && error.status !== 401) connect();
  }
  await answer.played();
  view.end();
  if (current === answer) current = null;
  updateButtons();
}

/** Leaves the media of early questions out where the server takes no more of them in one prompt. */
async function runWithinLimits(answer, ownConversation) {
  for (;;) {
    try {
      return await answer.run(model.id, ownConversation.messages());
    } catch (error) {
      if (error.code !== "too_many_media" || !ownConversation.forgetOldestMedia()) throw error;
    }
  }
}

/** Ends the answer that is being made or played; true if there was one. */
function stop() {
  const answer = current;
  current = null;
  answer?.stop();
  updateButtons();
  return answer !== null;
}

async function speak() {
  stop();
  stopReplay();
  unlockSound();
  notify("");
  try {
    await recorder.open();
    if (recorder.isOpen) announce("Recording");
  } catch (error) {
    if (!(error instanceof MicrophoneError)) throw error;
    notify(error.message);
  }
}

// --- the composer -------------------------------------------------------------------------------------------------

async function attach(files) {
  notify("");
  numReading += files.length;
  updateButtons();
  for (const file of files) {
    try {
      const attachment = await attachmentOf(file);
      if (model && !model.inputs.includes(attachment.kind)) throw new Error(`This model does not take ${attachment.kind} input.`);
      attachments.push(attachment);
    } catch (error) {
      notify(error.message);
    } finally {
      numReading -= 1;
    }
  }
  showAttachments();
}

function showAttachments() {
  const items = attachments.map((attachment) => {
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "remove";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${attachment.name}`);
    remove.addEventListener("click", () => {
      attachments = attachments.filter((other) => other !== attachment);
      discard(attachment);
      showAttachments();
      element("attach").focus();
    });
    const item = document.createElement("li");
    item.append(attachmentView(attachment), remove);
    return item;
  });
  element("attachments").replaceChildren(...items);
  element("attachments").hidden = items.length === 0;
  updateButtons();
}

function takeAttachments() {
  const taken = attachments;
  attachments = [];
  showAttachments();
  return taken;
}

function updateButtons() {
  const empty = element("text").value.trim() === "" && attachments.length === 0;
  element("send").disabled = empty || !ready || numReading > 0;
  element("mic").disabled = element("big-mic").disabled = !ready;
  // While an answer runs, the one button stops it; a new question may still be sent in its place.
  element("stop").hidden = current === null || !empty;
  element("send").hidden = !element("stop").hidden;
}

function resizeText() {
  const text = element("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
  updateButtons();
}

/** What went wrong beside the conversation; "" for nothing. */
function notify(message) {
  element("notice").textContent = message;
  element("notice").hidden = message === "";
}

/** Tells users of screen readers. */
function announce(message) {
  element("announcer").textContent = message;
}

function newConversation() {
  stop();
  stopReplay();
  conversation = new Conversation();
  for (const shown of element("turns").querySelectorAll("img, video")) URL.revokeObjectURL(shown.src);
  element("turns").replaceChildren();
  element("welcome").hidden = false;
  element("new-button").hidden = true;
  notify("");
  element("text").focus();
}

// --- events -------------------------------------------------------------------------------------------------------

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!element("send").disabled) send(takeAttachments());
});
element("text").addEventListener("input", resizeText);
element("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("composer").requestSubmit();
});
element("text").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length > 0) attach([...event.clipboardData.files]);
});
element("stop").addEventListener("click", stop);
element("mic").addEventListener("click", speak);
element("big-mic").addEventListener("click", speak);
element("attach").addEventListener("click", () => element("files").click());
element("files").addEventListener("change", async () => {
  await attach([...element("files").files]);
  element("files").value = "";
});
element("speak").addEventListener("change", () => {
  element("voice").disabled = !element("speak").checked;
});
element("new-button").addEventListener("click", newConversation);
element("key-button").addEventListener("click", async () => {
  if (await askForKey("Leave it empty to forget the key.")) connect();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !element("key-dialog").open) recorder.cancel() || stop();
});

let dragDepth = 0; // drags enter and leave every element on their way
function dragged(event, change) {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault();
  dragDepth = Math.max(0, dragDepth + change);
  element("drop").hidden = dragDepth === 0;
}
document.addEventListener("dragenter", (event) => dragged(event, 1));
document.addEventListener("dragleave", (event) => dragged(event, -1));
document.addEventListener("dragover", (event) => dragged(event, 0));
document.addEventListener("drop", (event) => {
  dragged(event, -dragDepth);
  if (event.dataTransfer?.files.length > 0) attach([...event.dataTransfer.files]);
});

element("key-button").hidden = apiKey.get() === "";
connect();
