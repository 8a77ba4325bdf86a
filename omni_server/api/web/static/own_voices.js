// The voices that users add, for models that speak with the voice of a recording.

import { ApiError, addVoice, deleteVoice } from "./api.js";
import { showFile } from "./clip.js";
import { withKey } from "./key_dialog.js";
import { announce, copyOf, element, show } from "./page.js";
import { ANSWER_RATE_HZ } from "./playback.js";
import { recordButton } from "./recording.js";
import { served } from "./served.js";
import { settings } from "./settings.js";

/** The recording to make a voice of. */
let file = null;
let isAdding = false;

function take(chosen) {
  file = chosen;
  element("voice-recording").textContent = file.name;
  showFile(element("voice-audio"), file);
  update();
}

async function add() {
  const fields = { name: element("voice-name").value.trim(), consent: element("voice-consent").value.trim() };
  const words = element("voice-words").value.trim();
  isAdding = true;
  update();
  await change(async () => {
    const { id, name } = await addVoice(file, words ? { ...fields, ref_text: words } : fields);
    settings.change({ voice: id });
    announce(`The voice ${name} has been added`);
    element("voice-form").reset();
    element("voice-audio").replaceChildren();
    element("voice-recording").textContent = "";
    file = null;
  });
  isAdding = false;
  update();
}

/** `request` changes the voices that there are. */
async function change(request) {
  show("voice-problem", "");
  try {
    await withKey(request);
    served.connect();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    show("voice-problem", error.message);
    served.doubt(error);
  }
}

function entry({ id, name }) {
  const item = copyOf("entry");
  item.querySelector(".title").textContent = name;
  item.querySelector(".open").addEventListener("click", () => settings.change({ voice: id }));
  const remove = item.querySelector(".forget");
  remove.setAttribute("aria-label", `Delete the voice “${name}”`);
  remove.addEventListener("click", () => {
    if (confirm(`Delete the voice “${name}” from the server?`)) change(() => deleteVoice(name));
  });
  return item;
}

function list() {
  if (served.model === null) return;
  const own = served.model.voices.filter(({ uploaded }) => uploaded);
  element("own-voices").hidden = !served.model.clonesVoices;
  element("own-voice-list").replaceChildren(...own.map(entry));
  if (own.length === 0) element("own-voices").open = true;
  update();
}

function update() {
  element("voice-add").disabled = file === null || isAdding || !served.isReady;
  element("voice-add").textContent = isAdding ? "Adding the voice" : "Add the voice";
}

element("voice-form").addEventListener("submit", (event) => {
  event.preventDefault();
  add();
});
element("voice-choose").addEventListener("click", () => element("voice-file").click());
element("voice-file").addEventListener("change", () => {
  const [chosen] = element("voice-file").files;
  if (chosen) take(chosen);
  element("voice-file").value = "";
});
recordButton(element("voice-record"), take, (problem) => show("voice-problem", problem), ANSWER_RATE_HZ);
served.watch(list);
