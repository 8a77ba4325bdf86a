// The tab that transcribes an audio file.

import { ApiError, transcribe } from "./api.js";
import { showFile } from "./clip.js";
import { withKey } from "./key_dialog.js";
import { announce, copyButton, element, show } from "./page.js";
import { silence } from "./playback.js";
import { recordButton } from "./recording.js";
import { served } from "./served.js";

const LARGE_BYTES = 25_000_000;
const TOO_LARGE =
  "The upload broke off. Unless it was set up otherwise, the server takes files of up to 25 MB.";

/** Ends the transcription that is being made. */
let abort = new AbortController();

/** `file` is a File. */
export async function transcribeFile(file) {
  abort.abort();
  abort = new AbortController();
  const { signal } = abort;
  silence();
  show("transcribe-problem", "");
  element("transcript").textContent = "";
  element("transcript-copy").hidden = true;
  element("transcript-box").hidden = false;
  element("transcript-box").setAttribute("aria-busy", "true");
  element("transcript-name").textContent = file.name;
  element("transcribe-stop").hidden = false;
  showFile(element("transcript-audio"), file);
  try {
    await withKey(() => write(file, signal));
    const text = element("transcript").textContent.trim();
    element("transcript").textContent = text;
    element("transcript-copy").hidden = text === "";
    if (text === "") show("transcribe-problem", "No words were heard in it.");
    announce(text);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof ApiError)) throw error;
    element("transcript-box").hidden = element("transcript").textContent === "";
    show("transcribe-problem", error.status === 0 && file.size > LARGE_BYTES ? TOO_LARGE : error.message);
    served.doubt(error);
  } finally {
    if (!signal.aborted || abort.signal === signal) settle();
  }
}

async function write(file, signal) {
  for await (const text of transcribe(file, served.model.id, signal)) element("transcript").append(text);
}

function settle() {
  element("transcript-box").setAttribute("aria-busy", "false");
  element("transcribe-stop").hidden = true;
}

element("transcribe-choose").addEventListener("click", () => element("transcribe-file").click());
element("transcribe-file").addEventListener("change", () => {
  const [file] = element("transcribe-file").files;
  if (file) transcribeFile(file);
  element("transcribe-file").value = "";
});
recordButton(element("transcribe-record"), transcribeFile, (problem) => show("transcribe-problem", problem));
element("transcribe-stop").addEventListener("click", () => abort.abort());
copyButton(element("transcript-copy"), () => element("transcript").textContent);
served.watch(() => {
  const isRefused = served.model?.hearsSpeech === false;
  for (const id of ["transcribe-choose", "transcribe-record"])
    element(id).disabled = isRefused || !served.isReady;
  if (isRefused) show("transcribe-problem", "This model does not understand speech: it cannot transcribe.");
});
