// The tab that transcribes an audio file.

import { ApiError, transcribe } from "./api.js";
import { Clip, formatDuration } from "./clip.js";
import { withKey } from "./key_dialog.js";
import { MicrophoneError } from "./microphone.js";
import { announce, copyButton, copyOf, element, show } from "./page.js";
import { silence } from "./playback.js";
import { Recording } from "./recording.js";
import { served } from "./served.js";
import { SPEECH_RATE_HZ, decodeAudioFile, encodeWav } from "./samples.js";

const LARGE_BYTES = 25_000_000;
const TOO_LARGE =
  "The upload broke off. Unless it was set up otherwise, the server takes files of up to 25 MB.";

/** Ends the transcription that is being made. */
let abort = new AbortController();
let recording = null;

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
  showClip(file);
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

/**
 * The waveform of a file that the browser can read; nothing for others, which the server may know
 * nevertheless.
 */
async function showClip(file) {
  const shown = copyOf("clip");
  shown.querySelector(".save").remove();
  element("transcript-audio").replaceChildren(shown);
  const samples = await decodeAudioFile(file).catch(() => null);
  if (samples === null) return;
  const clip = new Clip(shown, SPEECH_RATE_HZ, file.name);
  clip.add(samples);
  clip.draw();
}

async function startRecording() {
  silence();
  show("transcribe-problem", "");
  try {
    recording = await Recording.start(() => {
      if (recording === null) return; // it has just been finished
      element("transcribe-record").textContent = `Stop recording, ${formatDuration(recording.seconds)}`;
    });
    announce("Recording");
  } catch (error) {
    if (!(error instanceof MicrophoneError)) throw error;
    show("transcribe-problem", error.message);
  }
}

async function finishRecording() {
  const finished = recording;
  recording = null;
  const samples = await finished.finish();
  element("transcribe-record").textContent = "Record";
  transcribeFile(new File([encodeWav(samples, SPEECH_RATE_HZ)], "Recording.wav", { type: "audio/wav" }));
}

element("transcribe-choose").addEventListener("click", () => element("transcribe-file").click());
element("transcribe-file").addEventListener("change", () => {
  const [file] = element("transcribe-file").files;
  if (file) transcribeFile(file);
  element("transcribe-file").value = "";
});
element("transcribe-record").addEventListener("click", () =>
  recording ? finishRecording() : startRecording(),
);
element("transcribe-stop").addEventListener("click", () => abort.abort());
copyButton(element("transcript-copy"), () => element("transcript").textContent);
served.watch(() => {
  const isRefused = served.model?.hearsSpeech === false;
  for (const id of ["transcribe-choose", "transcribe-record"])
    element(id).disabled = isRefused || !served.isReady;
  if (isRefused) show("transcribe-problem", "This model does not understand speech: it cannot transcribe.");
});
