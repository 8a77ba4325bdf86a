// One answer: asks, shows and plays what streams in, and takes the times.

import { startAnswer } from "./api.js";
import { PcmDecoder } from "./samples.js";
import { ANSWER_RATE_HZ, Playback } from "./playback.js";
import { Timings } from "./timings.js";

export class Answer {
  #view;
  #abort = new AbortController();
  #decoder = new PcmDecoder();
  #playback = null;
  #announcedId = null;

  /** `view` shows the answer, see `TurnView`. */
  constructor(view) {
    this.#view = view;
    this.text = "";
    /** For later turns; null unless the whole answer has been spoken. */
    this.audioId = null;
    this.timings = new Timings();
    this.stopped = false;
  }

  /**
   * Resolves when the answer is complete or was stopped; its audio may still be playing. Throws `ApiError`.
   */
  async run(body) {
    this.timings = new Timings();
    try {
      const { requestId, chunks } = await startAnswer(body, this.#abort.signal);
      this.timings.markAccepted();
      this.#view.begin(this, requestId, body);
      for await (const chunk of chunks) this.#take(chunk);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      this.timings.markEnded();
      this.#playback?.end();
    }
  }

  /** Ends the request and the audio. */
  stop() {
    this.stopped = true;
    this.#abort.abort();
    this.silence();
  }

  silence() {
    this.#playback?.stop();
  }

  /** Resolves when nothing is being played (any more). */
  async played() {
    await this.#playback?.finished;
    this.updatePlayed();
  }

  updatePlayed() {
    if (this.#playback) this.timings.played = this.#playback.segments;
  }

  #take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, audio } = choice.delta;
    this.#addText(content ?? audio?.transcript ?? "");
    if (audio?.data) this.#addAudio(this.#decoder.decodeBase64(audio.data));
    if (audio?.id) this.#announcedId = audio.id;
    // An answer can be referred to by its id only once the server has said until when.
    if (audio?.expires_at) this.audioId = this.#announcedId;
    if (choice.finish_reason === "length") this.#view.note("Cut off at the length limit.");
  }

  #addText(text) {
    if (text === "") return;
    this.text += text;
    this.timings.markText();
    this.#view.text(text);
  }

  #addAudio(samples) {
    if (samples.length === 0) return;
    this.timings.markAudio(samples.length / ANSWER_RATE_HZ);
    if (this.#playback === null) {
      this.#playback = new Playback();
      this.#view.playing(this.#playback);
    }
    this.#playback.push(samples);
    this.#view.audio(samples);
  }
}
