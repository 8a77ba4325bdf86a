// Audio as samples: as WAV files, as the API's 16-bit little-endian PCM, and at another rate.

/** What the model's audio encoder works with. */
export const SPEECH_RATE_HZ = 16_000;

/** A mono file of 16-bit samples. `samples` is an Int16Array, or a Float32Array within [-1, 1]. */
export function encodeWav(samples, rateHz) {
  const pcm = samples instanceof Int16Array ? samples : toInt16(samples);
  const header = new DataView(new ArrayBuffer(44));
  const ascii = (offset, text) => [...text].forEach((c, i) => header.setUint8(offset + i, c.charCodeAt(0)));
  ascii(0, "RIFF");
  header.setUint32(4, 36 + pcm.byteLength, true);
  ascii(8, "WAVEfmt ");
  header.setUint32(16, 16, true); // size of the format block
  header.setUint16(20, 1, true); // PCM
  header.setUint16(22, 1, true); // channels
  header.setUint32(24, rateHz, true);
  header.setUint32(28, 2 * rateHz, true); // bytes per second
  header.setUint16(32, 2, true); // bytes per sample
  header.setUint16(34, 16, true); // bits per sample
  ascii(36, "data");
  header.setUint32(40, pcm.byteLength, true);
  return new Blob([header, pcm], { type: "audio/wav" });
}

/** `samples` (Float32Array, mono) at another rate, through the browser's own resampler. */
export async function resample(samples, fromHz, toHz) {
  if (fromHz === toHz || samples.length === 0) return samples;
  const context = new OfflineAudioContext(1, Math.ceil((samples.length * toHz) / fromHz), toHz);
  const source = context.createBufferSource();
  source.buffer = context.createBuffer(1, samples.length, fromHz);
  source.buffer.copyToChannel(samples, 0);
  source.connect(context.destination);
  source.start();
  return (await context.startRendering()).getChannelData(0);
}

/**
 * Any audio file that the browser can read, as mono samples at `SPEECH_RATE_HZ`. Throws a DOMException if it
 * cannot.
 */
export async function decodeAudioFile(file) {
  const context = new OfflineAudioContext(1, 1, SPEECH_RATE_HZ);
  const buffer = await context.decodeAudioData(await file.arrayBuffer());
  const mono = new Float32Array(buffer.length);
  for (let channel = 0; channel < buffer.numberOfChannels; channel++) {
    const samples = buffer.getChannelData(channel);
    for (let i = 0; i < mono.length; i++) mono[i] += samples[i] / buffer.numberOfChannels;
  }
  return mono;
}

export function toInt16(samples) {
  return Int16Array.from(samples, (sample) => Math.round(32767 * Math.max(-1, Math.min(1, sample))));
}

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
