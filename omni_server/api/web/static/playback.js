// Plays audio while it arrives: pieces are scheduled one behind the other, to the sample.

/** Of the answers. */
export const ANSWER_RATE_HZ = 24_000;

/** This much is collected before the audio starts, and again after it has run dry. */
const JITTER_S = 0.12;
/** Between the decision to play and the first sample. */
const LEAD_S = 0.03;

let context = null;
/** What has not been heard to its end. */
const audible = new Set();

/** Everything falls silent: only one thing is to be heard at a time, and nothing while somebody speaks. */
export function silence() {
  for (const playback of audible) playback.stop();
}

/** To be called within a click or key press, without which browsers stay silent. */
export function unlockAudio() {
  context ??= new AudioContext({ sampleRate: ANSWER_RATE_HZ, latencyHint: "interactive" });
  if (context.state === "suspended") context.resume();
}

export class Playback {
  #rateHz;
  #waiting = [];
  #sources = new Set();
  #segments = [];
  #ended = false;
  #stopped = false;
  #resolve;

  constructor(rateHz = ANSWER_RATE_HZ) {
    unlockAudio();
    this.#rateHz = rateHz;
    /** Resolves when the last sample has been heard, or after `stop`. */
    this.finished = new Promise((resolve) => (this.#resolve = resolve));
    audible.add(this);
    this.finished.then(() => audible.delete(this));
  }

  /** More samples, an Int16Array or Float32Array. */
  push(samples) {
    if (samples.length === 0 || this.#stopped) return;
    this.#waiting.push(samples);
    this.#schedule();
  }

  /** No more samples will come. */
  end() {
    this.#ended = true;
    this.#schedule();
    this.#settle();
  }

  /** What comes later is not played. */
  stop() {
    this.#stopped = true;
    const now = context.currentTime;
    for (const segment of this.#segments) segment.end = Math.max(segment.start, Math.min(segment.end, now));
    this.#waiting = [];
    this.#ended = true;
    for (const source of this.#sources) source.stop();
    this.#sources.clear();
    this.#resolve();
  }

  /** Seconds of audio that have been heard. */
  get playedSeconds() {
    const now = context.currentTime;
    return this.#segments.reduce((sum, { start, end }) => sum + Math.max(0, Math.min(now, end) - start), 0);
  }

  /** Stretches without a gap, as pairs of `performance.now()`; the last one may lie partly in the future. */
  get segments() {
    const offset = performance.now() - 1000 * context.currentTime;
    const latency = context.outputLatency || context.baseLatency || 0;
    return this.#segments.map(({ start, end }) =>
      [start, end].map((time) => offset + 1000 * (time + latency)),
    );
  }

  #schedule() {
    let segment = this.#segments.at(-1);
    if (!segment || segment.end < context.currentTime) {
      const buffered = this.#waiting.reduce((sum, samples) => sum + samples.length, 0);
      if (buffered === 0 || (buffered < JITTER_S * this.#rateHz && !this.#ended)) return;
      segment = this.#openSegment();
    }
    for (const samples of this.#waiting) {
      this.#start(samples, segment.start + segment.numSamples / this.#rateHz);
      segment.numSamples += samples.length;
      segment.end = segment.start + segment.numSamples / this.#rateHz;
    }
    this.#waiting = [];
  }

  /** It begins on a whole sample: between two, the browser would interpolate. */
  #openSegment() {
    const start = Math.ceil((context.currentTime + LEAD_S) * this.#rateHz) / this.#rateHz;
    const segment = { start, end: start, numSamples: 0 };
    this.#segments.push(segment);
    return segment;
  }

  #start(samples, time) {
    const buffer = context.createBuffer(1, samples.length, this.#rateHz);
    buffer.copyToChannel(
      samples instanceof Int16Array ? Float32Array.from(samples, (s) => s / 32768) : samples,
      0,
    );
    const source = context.createBufferSource();
    source.buffer = buffer;
    source.connect(context.destination);
    source.onended = () => {
      this.#sources.delete(source);
      this.#settle();
    };
    this.#sources.add(source);
    source.start(time);
  }

  #settle() {
    if (this.#ended && this.#waiting.length === 0 && this.#sources.size === 0) this.#resolve();
  }
}
