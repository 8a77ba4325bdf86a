// One answer of a spoken conversation: plays what has come of it, and knows how much of that was heard.

import { PcmDecoder } from "./samples.js";
import { Playback } from "./playback.js";

export class SpokenAnswer {
  #decoder = new PcmDecoder();
  #playback = null;
  #isOver = false;

  /** `onChange` is called when its audio begins and when it has ended. */
  constructor(itemId, onChange) {
    this.itemId = itemId;
    this.onChange = onChange;
  }

  /** It is being heard. */
  get isPlaying() {
    return this.#playback !== null && !this.#isOver;
  }

  /** Nothing more of it will be heard. */
  get isOver() {
    return this.#isOver;
  }

  get heardMs() {
    return Math.floor(1000 * (this.#playback?.playedSeconds ?? 0));
  }

  /** More of its audio, in base64. */
  add(base64) {
    if (this.#isOver) return;
    if (this.#playback === null) this.#begin();
    this.#playback.push(this.#decoder.decodeBase64(base64));
  }

  /** No more audio will come. */
  end() {
    if (this.#playback === null) this.#close();
    else this.#playback.end();
  }

  /** Silence, at once. */
  stop() {
    this.#playback?.stop();
    this.#close();
  }

  #begin() {
    this.#playback = new Playback();
    this.#playback.finished.then(() => this.#close());
    this.onChange();
  }

  #close() {
    if (this.#isOver) return;
    this.#isOver = true;
    this.onChange();
  }
}
