// Brings a stream of samples to another rate, piece by piece and without a seam.

/** Of the sinc, on each side: enough that what would fold back is not heard. */
const ZERO_CROSSINGS = 8;
/**
 * Positions between two samples that have a kernel of their own: exact from 8, 16, 44.1, 48 and 96 kHz to 24
 * kHz.
 */
const PHASES = 480;

export class Resampler {
  #step;
  #cutoff;
  #reach;
  #kernels = new Map();
  #waiting;
  #position;

  constructor(fromHz, toHz) {
    this.#step = fromHz / toHz;
    this.#cutoff = Math.min(1, toHz / fromHz);
    this.#reach = Math.ceil(ZERO_CROSSINGS / this.#cutoff);
    /** Silence before the first sample: the kernel looks back. */
    this.#waiting = new Float32Array(this.#reach);
    /** Of the next sample to make, in `#waiting`. */
    this.#position = this.#reach;
  }

  /** The samples (Float32Array) that can be made now; those at the end wait for what comes after them. */
  push(samples) {
    const input = new Float32Array(this.#waiting.length + samples.length);
    input.set(this.#waiting);
    input.set(samples, this.#waiting.length);
    const output = [];
    while (this.#position + this.#reach + 1 < input.length) {
      output.push(this.#sampleAt(input, this.#position));
      this.#position += this.#step;
    }
    const used = Math.floor(this.#position) - this.#reach;
    this.#waiting = input.slice(used);
    this.#position -= used;
    return Float32Array.from(output);
  }

  #sampleAt(input, position) {
    const phase = Math.round((position % 1) * PHASES);
    const kernel = this.#kernel(phase);
    const begin = Math.floor(position) - this.#reach;
    let sum = 0;
    for (let i = 0; i < kernel.length; i++) sum += kernel[i] * input[begin + i];
    return sum;
  }

  /** A sinc at the lower of the two rates under a Hann window, whose weights add up to 1. */
  #kernel(phase) {
    let kernel = this.#kernels.get(phase);
    if (kernel) return kernel;
    kernel = Float32Array.from({ length: 2 * this.#reach + 2 }, (_, i) => {
      const distance = i - this.#reach - phase / PHASES;
      const x = Math.PI * this.#cutoff * distance;
      const window =
        Math.abs(distance) < this.#reach ? 0.5 + 0.5 * Math.cos((Math.PI * distance) / this.#reach) : 0;
      return window * (x === 0 ? 1 : Math.sin(x) / x);
    });
    const sum = kernel.reduce((sum, weight) => sum + weight, 0);
    kernel = kernel.map((weight) => weight / sum);
    this.#kernels.set(phase, kernel);
    return kernel;
  }
}
