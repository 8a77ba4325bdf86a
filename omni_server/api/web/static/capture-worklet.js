// Runs on the audio thread: hands the microphone's samples on in pieces of some 30 ms.

const PIECE = 1280;

class Capture extends AudioWorkletProcessor {
  #piece = new Float32Array(PIECE);
  #filled = 0;

  process([[channel]]) {
    if (!channel) return true; // nothing is connected yet
    this.#piece.set(channel, this.#filled);
    this.#filled += channel.length; // 128, of which PIECE is a multiple
    if (this.#filled === PIECE) {
      this.port.postMessage(this.#piece, [this.#piece.buffer]);
      this.#piece = new Float32Array(PIECE);
      this.#filled = 0;
    }
    return true;
  }
}

registerProcessor("capture", Capture);
