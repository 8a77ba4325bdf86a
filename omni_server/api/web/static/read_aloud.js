// The tab that reads a text aloud.

import { ApiError, readAloud } from "./api.js";
import { Clip } from "./clip.js";
import { withKey } from "./key_dialog.js";
import { announce, copyButton, copyOf, download, element, show } from "./page.js";
import { ANSWER_RATE_HZ, Playback, silence, unlockAudio } from "./playback.js";
import { fileOf, speechAsCurl, speechAsPython } from "./program_text.js";
import { served } from "./served.js";
import { settings } from "./settings.js";
import { AudioFile } from "./audio_file.js";
import { formatSeconds, preparing } from "./timings.js";
import { voiceOf } from "./voices.js";

const REDRAW_MS = 120;

/** The reading that is being made or played. */
let current = null;
/** What the last complete reading gave: `{blob, name}`. */
let file = null;

function body() {
  const { speed, format } = settings.get();
  const input = element("read-text").value.trim();
  const instructions = element("read-instructions").value.trim();
  const asked = { model: served.model.id, input, voice: voiceOf(served.model), response_format: format, speed };
  return instructions ? { ...asked, instructions } : asked;
}

/** One text being read: shows and plays what comes. */
class Reading {
  #abort = new AbortController();
  #body;
  #file;
  #clip;
  #playback = null;
  #began = performance.now();

  constructor(body) {
    this.#body = body;
    this.#file = new AudioFile(body.response_format);
    const shown = copyOf("clip");
    shown.querySelector(".save").remove(); // the file is offered in the format that was asked for
    element("read-audio").replaceChildren(shown);
    this.#clip = new Clip(shown, ANSWER_RATE_HZ, "the text");
  }

  /** Resolves when all has been heard or it was stopped. Throws `ApiError`. */
  async run() {
    this.#playback = new Playback();
    this.#clip.follow(this.#playback);
    const drawing = setInterval(() => this.#draw(), REDRAW_MS);
    try {
      for await (const bytes of readAloud(this.#body, this.#abort.signal)) this.#add(this.#file.push(bytes));
      const seconds = this.#seconds();
      this.#offer();
      this.#add(await this.#decode());
      this.#playback.end();
      showStatus(`${formatSeconds(this.#clip.seconds)} of speech, made in ${formatSeconds(seconds)}`);
      announce("The text is complete");
      this.#clip.draw();
      await this.#playback.finished;
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      showStatus("Stopped.");
    } finally {
      this.#playback.end();
      clearInterval(drawing);
      this.#clip.draw();
    }
  }

  #draw() {
    if (this.#clip.seconds === 0) showStatus(preparing(this.#seconds()));
    this.#clip.draw();
  }

  stop() {
    this.#abort.abort();
    this.#playback?.stop();
  }

  /** Since the request. */
  #seconds() {
    return (performance.now() - this.#began) / 1000;
  }

  #add(samples) {
    if (samples.length === 0) return;
    if (this.#clip.seconds === 0) showStatus(`First audio after ${formatSeconds(this.#seconds())}`);
    this.#clip.add(samples);
    this.#playback.push(samples);
  }

  /** A WAV file that was sent while it was made does not know its length; the one that is offered does. */
  #offer() {
    const blob = this.#body.response_format === "wav" ? this.#clip.file() : this.#file.blob();
    file = { blob, name: fileOf(this.#body) };
    element("read-download").hidden = false;
    element("read-download").textContent = `Download ${file.name}`;
  }

  async #decode() {
    try {
      return await this.#file.decode();
    } catch {
      throw new ApiError(
        `This browser cannot play ${this.#body.response_format.toUpperCase()} files; download it instead.`,
      );
    }
  }
}

async function read() {
  stop();
  silence();
  unlockAudio();
  show("read-problem", "");
  showStatus(preparing(0));
  file = null;
  element("read-download").hidden = true;
  const reading = new Reading(body());
  setCurrent(reading);
  try {
    await withKey(() => reading.run());
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showStatus("");
    show("read-problem", error.message);
    served.doubt(error);
  }
  if (current === reading) setCurrent(null);
}

function stop() {
  const reading = current;
  setCurrent(null);
  reading?.stop();
}

function setCurrent(reading) {
  current = reading;
  updateButtons();
}

function showStatus(text) {
  element("read-status").textContent = text;
}

function updateButtons() {
  const { value } = element("read-text");
  const isEmpty = value.trim() === "";
  const count = [...value].length; // as the server counts, not in UTF-16
  const limit = served.model?.maxSpeechCharacters ?? 4096;
  element("read-count").textContent = `${count} of ${limit} characters${count > limit ? ": too long" : ""}`;
  const isReadable = served.isReady && !isEmpty && count <= limit;
  element("read-start").hidden = current !== null;
  element("read-stop").hidden = current === null;
  element("read-start").disabled = !isReadable;
  for (const button of element("read-copies").children) button.disabled = served.model === null || isEmpty;
}

element("read-form").addEventListener("submit", (event) => {
  event.preventDefault();
  read();
});
element("read-stop").addEventListener("click", stop);
element("read-download").addEventListener("click", () => download(file.blob, file.name));
element("read-text").addEventListener("input", updateButtons);
element("speed").addEventListener("input", () => settings.change({ speed: Number(element("speed").value) }));
element("format").addEventListener("change", () => settings.change({ format: element("format").value }));
copyButton(element("read-as-curl"), () => speechAsCurl(body()));
copyButton(element("read-as-python"), () => speechAsPython(body()));
settings.watch(({ speed, format }) => {
  element("speed").value = speed;
  element("speed-shown").textContent = `${speed} ×`;
  element("format").value = format;
});
served.watch(() => {
  updateButtons();
  const { answers, clonesVoices, voices } = served.model ?? {};
  const isDescribed = answers === false && !clonesVoices && voices.every(({ id }) => id === "Default");
  element("read-instructions-label").textContent = isDescribed ? "Description of the voice" : "Instructions";
  element("read-instructions").placeholder = isDescribed ? "A calm, deep voice" : "How to read it";
});
