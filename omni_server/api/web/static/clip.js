// A piece of audio on the page: its waveform, how far it has been played, a button to play it again.

import { copyOf, download } from "./page.js";
import { Playback, silence } from "./playback.js";
import { SPEECH_RATE_HZ, decodeAudioFile, encodeWav, toInt16 } from "./samples.js";

const BARS = 64;

export class Clip {
  #pieces = [];
  #numSamples = 0;
  #rateHz;
  #element;
  #playback = null;

  /** `element` is a copy of the template `clip`, with or without its button to save. */
  constructor(element, rateHz, name) {
    this.#element = element;
    this.#rateHz = rateHz;
    this.#part("play").addEventListener("click", () =>
      this.#playback ? this.#playback.stop() : this.#replay(),
    );
    this.#part("play").setAttribute("aria-label", `Play ${name}`);
    this.#part("save")?.addEventListener("click", () => download(this.file(), "speech.wav"));
    this.#part("save")?.setAttribute("aria-label", `Save ${name}`);
  }

  get seconds() {
    return this.#numSamples / this.#rateHz;
  }

  /** What there is of it, as a WAV file. */
  file() {
    return encodeWav(this.#samples(), this.#rateHz);
  }

  /** More samples, an Int16Array or Float32Array. */
  add(samples) {
    this.#pieces.push(samples);
    this.#numSamples += samples.length;
    this.#element.hidden = false;
  }

  draw() {
    const path = wavePath(peaksOf(this.#pieces, this.#numSamples));
    for (const wave of this.#element.querySelectorAll(".wave path")) wave.setAttribute("d", path);
    this.#part("duration").textContent = formatDuration(this.seconds);
  }

  /**
   * Shows how far `playback`, which plays this clip, has come, until it is finished. Its button then stops
   * it.
   */
  async follow(playback) {
    this.#playback = playback;
    this.#element.classList.add("playing");
    const show = () => {
      if (this.#playback !== playback) return;
      this.#element.style.setProperty(
        "--played",
        String(playback.playedSeconds / Math.max(this.seconds, 0.01)),
      );
      requestAnimationFrame(show);
    };
    show();
    await playback.finished;
    this.#playback = null;
    this.#element.classList.remove("playing");
    this.#element.style.setProperty("--played", "0");
  }

  async #replay() {
    silence();
    const playback = new Playback(this.#rateHz);
    for (const piece of this.#pieces) playback.push(piece);
    playback.end();
    await this.follow(playback);
  }

  #samples() {
    const samples = new Int16Array(this.#numSamples);
    let position = 0;
    for (const piece of this.#pieces) {
      samples.set(piece instanceof Int16Array ? piece : toInt16(piece), position);
      position += piece.length;
    }
    return samples;
  }

  #part(name) {
    return this.#element.querySelector(`.${name}`);
  }
}

/**
 * Shows `file` in `container`; nothing of files that the browser cannot read, which the server may know
 * nevertheless.
 */
export async function showFile(container, file) {
  const shown = copyOf("clip");
  shown.querySelector(".save").remove();
  container.replaceChildren(shown);
  const samples = await decodeAudioFile(file).catch(() => null);
  if (samples === null) return;
  const clip = new Clip(shown, SPEECH_RATE_HZ, file.name);
  clip.add(samples);
  clip.draw();
}

/** The largest sample of each of `BARS` equal stretches, 0 to 1. */
function peaksOf(pieces, numSamples) {
  const peaks = new Array(BARS).fill(0);
  let position = 0;
  for (const piece of pieces) {
    const scale = piece instanceof Int16Array ? 1 / 32768 : 1;
    for (let i = 0; i < piece.length; i += 8, position += 8) {
      const bar = Math.min(BARS - 1, Math.floor((position * BARS) / numSamples));
      peaks[bar] = Math.max(peaks[bar], Math.abs(piece[i]) * scale);
    }
    position += piece.length - 8 * Math.ceil(piece.length / 8);
  }
  const loudest = Math.max(...peaks, 0.05);
  return peaks.map((peak) => peak / loudest);
}

/** Bars around the middle of a box of 4 * BARS by 24. */
function wavePath(peaks) {
  return peaks
    .map((peak, i) => {
      const height = Math.max(1.5, 22 * peak);
      return `M${4 * i + 2} ${12 - height / 2}v${height}`;
    })
    .join("");
}

export function formatDuration(seconds) {
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
