// When what happened to one answer, as far as this page can tell. All times are `performance.now()`.

export class Timings {
  constructor() {
    this.sent = performance.now();
    /** When the server began to answer. */
    this.accepted = null;
    /** Arrival of each piece of text. */
    this.text = [];
    /** Arrival of each piece of sound. */
    this.sound = [];
    /** Pairs: stretches of playback without a gap. */
    this.played = [];
    /** When the last byte had arrived, or the answer was given up. */
    this.ended = null;
    this.soundSeconds = 0;
  }

  /** Seconds from the request to `time`. */
  since(time) {
    return (time - this.sent) / 1000;
  }

  markAccepted() {
    this.accepted = performance.now();
  }

  markText() {
    this.text.push(performance.now());
  }

  markSound(seconds) {
    this.sound.push(performance.now());
    this.soundSeconds += seconds;
  }

  markEnded() {
    this.ended ??= performance.now();
  }
}

export function formatSeconds(seconds) {
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}
