// An audio file of the server's while it arrives.

import { PcmDecoder } from "./samples.js";
import { ANSWER_RATE_HZ } from "./playback.js";

/** By the API's name; those that are not here are decoded by the browser once they are complete. */
const HEARD_AT_ONCE = new Set(["wav", "pcm"]);
const MEDIA_TYPES = {
  mp3: "audio/mpeg",
  opus: "audio/ogg",
  aac: "audio/aac",
  flac: "audio/flac",
  pcm: "audio/pcm",
};

export class AudioFile {
  #format;
  #pieces = [];
  #decoder = new PcmDecoder();
  #hasHeader;

  constructor(format) {
    this.#format = format;
    this.#hasHeader = format === "wav";
  }

  /**
   * Takes the next bytes. Returns the samples that they bring, at `ANSWER_RATE_HZ`; none before the end of
   * some formats.
   */
  push(bytes) {
    this.#pieces.push(bytes);
    if (!HEARD_AT_ONCE.has(this.#format)) return new Int16Array(0);
    return this.#decoder.decode(this.#hasHeader ? this.#withoutHeader() : bytes);
  }

  /**
   * The file as a whole. Of a WAV file only the samples are worth having: its header was written before its
   * end.
   */
  blob() {
    return new Blob(this.#pieces, { type: MEDIA_TYPES[this.#format] });
  }

  /**
   * The samples of a format that was not heard while it came. Throws a DOMException if the browser cannot
   * read it.
   */
  async decode() {
    if (HEARD_AT_ONCE.has(this.#format)) return new Float32Array(0);
    const context = new OfflineAudioContext(1, 1, ANSWER_RATE_HZ);
    const buffer = await context.decodeAudioData(await this.blob().arrayBuffer());
    return buffer.getChannelData(0);
  }

  /** What of all the bytes so far are samples; nothing while the header is incomplete. */
  #withoutHeader() {
    const bytes = new Uint8Array(this.#pieces.reduce((sum, piece) => sum + piece.length, 0));
    let position = 0;
    for (const piece of this.#pieces) {
      bytes.set(piece, position);
      position += piece.length;
    }
    const begin = beginOfSamples(bytes);
    if (begin === null) return new Uint8Array(0);
    this.#hasHeader = false;
    return bytes.subarray(begin);
  }
}

/** Behind the chunk header `data` of a WAV file; null if `bytes` do not hold it yet. */
function beginOfSamples(bytes) {
  const view = new DataView(bytes.buffer);
  const name = (position) => String.fromCharCode(...bytes.subarray(position, position + 4));
  for (let position = 12; position + 8 <= bytes.length; position += 8 + view.getUint32(position + 4, true)) {
    if (name(position) === "data") return position + 8;
  }
  return null;
}
