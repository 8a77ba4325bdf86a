// Records what is said until it is finished or given up.

import { formatDuration } from "./clip.js";
import { Microphone, MicrophoneError, loudness } from "./microphone.js";
import { announce } from "./page.js";
import { silence } from "./playback.js";
import { SPEECH_RATE_HZ, encodeWav, resample } from "./samples.js";

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

  /** Ends the recording. Resolves to its samples. */
  async finish(toHz = SPEECH_RATE_HZ) {
    const samples = new Float32Array(this.#numSamples);
    let position = 0;
    for (const piece of this.#pieces) {
      samples.set(piece, position);
      position += piece.length;
    }
    const rateHz = this.#microphone.rateHz;
    this.#microphone.close();
    return resample(samples, rateHz, toHz);
  }

  cancel() {
    this.#microphone.close();
  }
}

/**
 * Makes `button` start and end recordings. `onFile` gets each as a WAV file; `onProblem` gets why there is none,
 * and "" at the start.
 */
export function recordButton(button, onFile, onProblem, rateHz = SPEECH_RATE_HZ) {
  const label = button.textContent;
  let recording = null;
  let isStarting = false; // not `disabled`, with which the button would lose the focus

  async function start() {
    if (isStarting) return;
    isStarting = true;
    silence();
    onProblem("");
    try {
      recording = await Recording.start(() => {
        if (recording === null) return; // it has just been finished
        button.textContent = `Stop recording, ${formatDuration(recording.seconds)}`;
      });
      announce("Recording");
    } catch (error) {
      if (!(error instanceof MicrophoneError)) throw error;
      onProblem(error.message);
    } finally {
      isStarting = false;
    }
  }

  async function finish() {
    const finished = recording;
    recording = null;
    const samples = await finished.finish(rateHz);
    button.textContent = label;
    onFile(new File([encodeWav(samples, rateHz)], "Recording.wav", { type: "audio/wav" }));
  }

  button.addEventListener("click", () => (recording ? finish() : start()));
}
