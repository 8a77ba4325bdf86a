// Files and recordings as parts of a question, and what shows them.

import { Clip } from "./clip.js";
import { copyOf } from "./page.js";
import { decodeAudioFile, encodeWav, SPEECH_RATE_HZ } from "./samples.js";

/** Larger pictures are scaled down before they are sent: more detail costs a model thousands of tokens. */
const MAX_PIXELS = 768 * 1024;

/**
 * What a question holds beside its text:
 * `{kind: "audio" | "image" | "video", name, part, url?, samples?}`, where `part` is the API's content part,
 * `url` shows a picture or video on this page, and `samples` are mono at `SPEECH_RATE_HZ`.
 */
export async function attachmentOf(file) {
  const kind = isImage(file) ? "image" : file.type.split("/")[0];
  switch (kind) {
    case "audio":
      return audioFile(file);
    case "image": {
      const picture = await scaledDown(file);
      const url = await dataUrl(picture);
      return {
        kind,
        name: file.name,
        part: { type: "image_url", image_url: { url } },
        url: URL.createObjectURL(picture),
      };
    }
    case "video": {
      const url = await dataUrl(file);
      return {
        kind,
        name: file.name,
        part: { type: "video_url", video_url: { url } },
        url: URL.createObjectURL(file),
      };
    }
  }
  throw new Error(`“${file.name}” is not an audio, image or video file.`);
}

/** Browsers that cannot show a format often do not know its type either. */
export function isImage(file) {
  return file.type.startsWith("image/") || (!file.type && /\.(avif|hei[cf])$/i.test(file.name));
}

/** `samples` are a Float32Array, mono, at `SPEECH_RATE_HZ`. */
export async function recordingOf(samples, name = "Recording") {
  const url = await dataUrl(encodeWav(samples, SPEECH_RATE_HZ));
  const data = url.slice(url.indexOf(",") + 1);
  return {
    kind: "audio",
    name,
    samples,
    part: { type: "input_audio", input_audio: { data, format: "wav" } },
  };
}

/** To be called when the picture or video of an attachment is shown no more. */
export function discard(attachment) {
  if (attachment.url) URL.revokeObjectURL(attachment.url);
  delete attachment.url;
}

/** Decoded here, so that whatever the browser can read may be sent, and its waveform be shown. */
async function audioFile(file) {
  let samples;
  try {
    samples = await decodeAudioFile(file);
  } catch {
    // The server may know the format, and says so if not.
    const part = { type: "audio_url", audio_url: { url: await dataUrl(file) } };
    return { kind: "audio", name: file.name, part };
  }
  return recordingOf(samples, file.name);
}

async function scaledDown(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return file; // as above
  }
  const scale = Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height));
  if (scale >= 1) return file;
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(bitmap.width * scale);
  canvas.height = Math.round(bitmap.height * scale);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) =>
    canvas.toBlob(resolve, file.type === "image/png" ? "image/png" : "image/jpeg", 0.9),
  );
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** An entry of a list of attachments, with a button that calls `remove`. */
export function attachmentItem(attachment, remove) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "remove";
  button.textContent = "×";
  button.setAttribute("aria-label", `Remove ${attachment.name}`);
  button.addEventListener("click", remove);
  const item = document.createElement("li");
  item.append(attachmentView(attachment), button);
  return item;
}

/** A waveform, a picture, a video, or its name where the browser cannot read it. */
export function attachmentView(attachment) {
  const { kind, name, url, samples } = attachment;
  if (kind === "audio" && samples) {
    const element = copyOf("clip");
    element.querySelector(".save").remove();
    const clip = new Clip(element, SPEECH_RATE_HZ, name);
    clip.add(samples);
    clip.draw();
    element.title = name;
    return element;
  }
  const label = Object.assign(document.createElement("span"), { className: "file", textContent: name });
  if (!url) return label;
  const shown =
    kind === "image"
      ? Object.assign(document.createElement("img"), { src: url, alt: name })
      : Object.assign(document.createElement("video"), {
          src: url,
          controls: true,
          muted: true,
          title: name,
        });
  // The server may know the format nevertheless.
  shown.addEventListener("error", () => {
    shown.replaceWith(label);
    discard(attachment);
  });
  return shown;
}
