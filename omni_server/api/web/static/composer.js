// Where a question is written, spoken, and given its files.

import { attachmentItem, attachmentOf, discard, recordingOf } from "./attachments.js";
import { MicrophoneError } from "./microphone.js";
import { announce, element, show } from "./page.js";
import { Recorder } from "./recorder.js";
import { served } from "./served.js";
import { settings } from "./settings.js";

let attachments = [];
/** Files that are being read. */
let numReading = 0;
let isAnswering = false;
let send = () => {};
let beforeRecording = () => {};

const recorder = new Recorder(async (samples) => {
  if (samples.length === 0) return notify("Nothing was recorded.");
  sendAll([await recordingOf(samples)]);
});

export const composer = {
  /**
   * `onSend(text, attachments)` gets each question. `onRecord` is called when a recording is about to begin.
   */
  start(onSend, onRecord) {
    send = onSend;
    beforeRecording = onRecord;
  },

  /** While an answer runs, the one button stops it; a new question may still be sent in its place. */
  setAnswering(value) {
    isAnswering = value;
    updateButtons();
  },

  /** Discards the recording that is being made; false if there is none. */
  cancelRecording: () => recorder.cancel(),

  focus: () => element("text").focus(),

  async attach(files) {
    notify("");
    numReading += files.length;
    updateButtons();
    for (const file of files) {
      try {
        const attachment = await attachmentOf(file);
        const isTaken = served.model?.inputs.includes(attachment.kind) ?? true;
        if (!isTaken) throw new Error(`This model does not take ${attachment.kind} input.`);
        attachments.push(attachment);
      } catch (error) {
        notify(error.message);
      } finally {
        numReading -= 1;
      }
    }
    showAttachments();
  },

  /** Recording instead of writing. */
  async record() {
    beforeRecording();
    notify("");
    try {
      await recorder.open();
      if (recorder.isOpen) announce("Recording");
    } catch (error) {
      if (!(error instanceof MicrophoneError)) throw error;
      notify(error.message);
    }
  },
};

/** What went wrong beside the chat; "" for nothing. */
export function notify(message) {
  show("notice", message);
}

function sendAll(more) {
  const text = element("text").value.trim();
  const media = [...takeAttachments(), ...more];
  if (!text && media.length === 0) return;
  element("text").value = "";
  resizeText();
  send(text, media);
}

function takeAttachments() {
  const taken = attachments;
  attachments = [];
  showAttachments();
  return taken;
}

function showAttachments() {
  const items = attachments.map((attachment) =>
    attachmentItem(attachment, () => {
      attachments = attachments.filter((other) => other !== attachment);
      discard(attachment);
      showAttachments();
      element("attach").focus();
    }),
  );
  element("attachments").replaceChildren(...items);
  element("attachments").hidden = items.length === 0;
  updateButtons();
}

function updateButtons() {
  const isEmpty = element("text").value.trim() === "" && attachments.length === 0;
  element("send").disabled = isEmpty || !served.isReady || numReading > 0;
  element("mic").disabled = element("big-mic").disabled = !served.isReady;
  element("stop").hidden = !isAnswering || !isEmpty;
  element("send").hidden = !element("stop").hidden;
}

function resizeText() {
  const text = element("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
  updateButtons();
}

function offerWhatIsServed() {
  updateButtons();
  if (served.model === null) return;
  const { inputs, voices } = served.model;
  const media = ["audio", "image", "video"].filter((kind) => inputs.includes(kind));
  element("files").accept = media.map((kind) => `${kind}/*`).join(",");
  element("attach").hidden = media.length === 0;
  element("mic").hidden = element("big-mic").hidden = !media.includes("audio");
  element("speak-option").hidden = voices.length === 0;
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!element("send").disabled) sendAll([]);
});
element("text").addEventListener("input", resizeText);
element("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("composer").requestSubmit();
});
element("text").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length > 0) composer.attach([...event.clipboardData.files]);
});
element("mic").addEventListener("click", composer.record);
element("big-mic").addEventListener("click", composer.record);
element("attach").addEventListener("click", () => element("files").click());
element("files").addEventListener("change", async () => {
  await composer.attach([...element("files").files]);
  element("files").value = "";
});
element("speak").addEventListener("change", () => settings.change({ speaks: element("speak").checked }));
settings.watch(({ speaks }) => {
  element("speak").checked = speaks;
  element("voice").disabled = !speaks;
});
served.watch(offerWhatIsServed);
