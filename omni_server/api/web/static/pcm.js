// 16-bit little-endian samples as the API sends and takes them.

/** A stream of bytes that may be cut anywhere: a half sample waits for its other half. */
export class PcmDecoder {
  #half = new Uint8Array(0);

  /** The samples that `bytes` complete. */
  decode(bytes) {
    const all = new Uint8Array(this.#half.length + bytes.length);
    all.set(this.#half);
    all.set(bytes, this.#half.length);
    const numSamples = all.length >> 1;
    this.#half = all.slice(2 * numSamples);
    const view = new DataView(all.buffer);
    return Int16Array.from({ length: numSamples }, (_, i) => view.getInt16(2 * i, true));
  }

  decodeBase64(text) {
    return this.decode(Uint8Array.from(atob(text), (character) => character.charCodeAt(0)));
  }
}

/** Base64 of `samples`, an Int16Array. */
export function encodePcm(samples) {
  const view = new DataView(new ArrayBuffer(2 * samples.length));
  samples.forEach((sample, i) => view.setInt16(2 * i, sample, true));
  return btoa(Array.from(new Uint8Array(view.buffer), (byte) => String.fromCharCode(byte)).join(""));
}
