// The composer's recording state: level meter, time, discard and send.

import { formatDuration } from "./clip.js";
import { element } from "./page.js";
import { Recording } from "./recording.js";

const METER_BARS = 40;

export class Recorder {
  #recording = null;
  #starting = null;
  #onRecorded;

  /** `onRecorded` gets the samples of each recording that is sent, at 16 kHz. */
  constructor(onRecorded) {
    this.#onRecorded = onRecorded;
    element("record-send").addEventListener("click", () => this.#send());
    element("record-cancel").addEventListener("click", () => this.cancel());
    const bars = Array.from({ length: METER_BARS }, () => document.createElement("i"));
    element("levels").append(...bars);
  }

  get isOpen() {
    return this.#starting !== null;
  }

  /** Throws `MicrophoneError`. */
  async open() {
    if (this.isOpen) return;
    const starting = Recording.start((level) => this.#show(level));
    this.#starting = starting;
    let recording;
    try {
      recording = await starting;
    } catch (error) {
      if (this.#starting === starting) this.#starting = null;
      throw error;
    }
    if (this.#starting !== starting) return recording.cancel(); // discarded while the browser asked for permission
    this.#recording = recording;
    for (const bar of element("levels").children) bar.style.setProperty("--level", "0");
    element("record-time").textContent = "0:00";
    this.#toggle(true);
    element("record-send").focus();
  }

  /** True if there was something to discard. */
  cancel() {
    const wasOpen = this.isOpen;
    this.#close()?.cancel();
    return wasOpen;
  }

  async #send() {
    const samples = await this.#close().finish();
    this.#onRecorded(samples);
  }

  #close() {
    const recording = this.#recording;
    this.#recording = null;
    this.#starting = null;
    this.#toggle(false);
    return recording;
  }

  #toggle(open) {
    element("recording").hidden = !open;
    element("writing").hidden = open;
    if (!open) element("mic").focus({ preventScroll: true }); // not the text: a phone would open its keyboard
  }

  #show(level) {
    if (this.#recording === null) return;
    const bars = element("levels");
    bars.append(bars.firstElementChild);
    bars.lastElementChild.style.setProperty("--level", level.toFixed(2));
    element("record-time").textContent = formatDuration(this.#recording.seconds);
  }
}
