// Records what is said until it is finished or given up.

import { Microphone, loudness } from "./microphone.js";
import { SPEECH_RATE_HZ, resample } from "./samples.js";

export class Recording {
  #microphone;
  #pieces = [];
  #numSamples = 0;

  /** `onLevel` gets the loudness of each piece, 0 to 1. Throws `MicrophoneError`. */
  static async start(onLevel) {
    const recording = new Recording();
    recording.#microphone = await Microphone.open((piece) => {
      recording.#pieces.push(piece);
      recording.#numSamples += piece.length;
      onLevel(loudness(piece));
    });
    return recording;
  }

  get seconds() {
    return this.#numSamples / this.#microphone.rateHz;
  }

  /** Ends the recording. Resolves to its samples at `SPEECH_RATE_HZ`. */
  async finish() {
    const samples = new Float32Array(this.#numSamples);
    let position = 0;
    for (const piece of this.#pieces) {
      samples.set(piece, position);
      position += piece.length;
    }
    const rateHz = this.#microphone.rateHz;
    this.#microphone.close();
    return resample(samples, rateHz, SPEECH_RATE_HZ);
  }

  cancel() {
    this.#microphone.close();
  }
}
