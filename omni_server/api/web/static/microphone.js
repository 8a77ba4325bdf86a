// The microphone: its samples as they come.

/** Why there is no audio from the microphone, in words. */
export class MicrophoneError extends Error {}

export class Microphone {
  #stream;
  #context;

  /**
   * `onPiece` gets mono samples (Float32Array) at `rateHz`, some 30 ms at a time; `onLost` is called when the
   * device goes away. Throws `MicrophoneError`.
   */
  static async open(onPiece, onLost = () => {}) {
    if (!navigator.mediaDevices) {
      throw new MicrophoneError("Browsers give the microphone only to pages from https:// or localhost.");
    }
    const microphone = new Microphone();
    // Made while the click still counts: later it might have to wait for another one.
    microphone.#context = new AudioContext();
    try {
      microphone.#stream = await navigator.mediaDevices.getUserMedia({
        audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
      });
      for (const track of microphone.#stream.getTracks()) track.addEventListener("ended", onLost);
      await microphone.#connect(onPiece);
    } catch (error) {
      microphone.close();
      throw new MicrophoneError(explain(error));
    }
    return microphone;
  }

  get rateHz() {
    return this.#context.sampleRate;
  }

  close() {
    this.#stream?.getTracks().forEach((track) => track.stop());
    if (this.#context.state !== "closed") this.#context.close();
  }

  async #connect(onPiece) {
    const context = this.#context;
    await context.resume();
    await context.audioWorklet.addModule(new URL("capture-worklet.js", import.meta.url));
    const capture = new AudioWorkletNode(context, "capture", {
      channelCount: 1,
      channelCountMode: "explicit",
    });
    capture.port.onmessage = ({ data: piece }) => onPiece(piece);
    context.createMediaStreamSource(this.#stream).connect(capture);
    capture.connect(context.destination); // silent, but what leads nowhere is not run
  }
}

/** 0 at -54 dB of full scale and below, 1 at -6 dB: speech lies between. */
export function loudness(piece) {
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
