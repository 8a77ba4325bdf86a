// What shows an attachment of a question.

import { discard } from "./attachments.js";
import { Clip } from "./clip.js";
import { copyOf } from "./page.js";
import { SPEECH_RATE_HZ } from "./wav.js";

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
