// Records what is said.

import { SPEECH_RATE_HZ, resample } from "./wav.js";

/** Why there can be no recording, in words. */
export class MicrophoneError extends Error {}

export class Recording {
  #stream;
  #context;
  #pieces = [];

  /** `onLevel` gets the loudness of each piece, 0 to 1. Throws `MicrophoneError`. */
  static async start(onLevel) {
    if (!navigator.mediaDevices) {
      throw new MicrophoneError("Browsers give the microphone only to pages from https:// or localhost.");
    }
    const recording = new Recording();
    // Made while the click still counts: later it might have to wait for another one.
    recording.#context = new AudioContext();
    try {
      recording.#stream = await navigator.mediaDevices.getUserMedia({
        audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
      });
      await recording.#connect(onLevel);
    } catch (error) {
      recording.#release();
      throw new MicrophoneError(explain(error));
    }
    return recording;
  }

  get seconds() {
    return this.#numSamples() / this.#context.sampleRate;
  }

  /** Ends the recording. Resolves to its samples at `SPEECH_RATE_HZ`. */
  async finish() {
    const samples = new Float32Array(this.#numSamples());
    let position = 0;
    for (const piece of this.#pieces) {
      samples.set(piece, position);
      position += piece.length;
    }
    const rateHz = this.#context.sampleRate;
    this.#release();
    return resample(samples, rateHz, SPEECH_RATE_HZ);
  }

  cancel() {
    this.#release();
  }

  async #connect(onLevel) {
    const context = this.#context;
    await context.resume();
    await context.audioWorklet.addModule(new URL("capture-worklet.js", import.meta.url));
    const capture = new AudioWorkletNode(context, "capture", { channelCount: 1, channelCountMode: "explicit" });
    capture.port.onmessage = ({ data: piece }) => {
      this.#pieces.push(piece);
      onLevel(loudness(piece));
    };
    context.createMediaStreamSource(this.#stream).connect(capture);
    capture.connect(context.destination); // silent, but what leads nowhere is not run
  }

  #numSamples() {
    return this.#pieces.reduce((sum, piece) => sum + piece.length, 0);
  }

  #release() {
    this.#stream?.getTracks().forEach((track) => track.stop());
    if (this.#context.state !== "closed") this.#context.close();
  }
}

/** 0 at -54 dB of full scale and below, 1 at -6 dB: speech lies between. */
function loudness(piece) {
  const power = piece.reduce((sum, sample) => sum + sample * sample, 0) / piece.length;
  return Math.max(0, Math.min(1, (10 * Math.log10(power + 1e-12) + 54) / 48));
}

function explain(error) {
  switch (error.name) {
    case "NotAllowedError":
      return "The browser does not let this page use the microphone. Allow it in the address bar and try again.";
    case "NotFoundError":
      return "No microphone was found.";
    case "NotReadableError":
      return "The microphone is in use by another program.";
  }
  return `The microphone could not be started: ${error.message}`;
}
