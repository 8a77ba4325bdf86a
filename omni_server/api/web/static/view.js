// Turns of the conversation on the page.

import { discard } from "./attachments.js";
import { Clip } from "./clip.js";
import { ANSWER_RATE_HZ } from "./playback.js";
import { drawTimeline } from "./timeline.js";
import { formatSeconds } from "./timings.js";
import { SPEECH_RATE_HZ } from "./wav.js";

const REDRAW_MS = 120;
const NEAR_PX = 80;

const page = document.getElementById("conversation");
/** Whether the end is to stay in view: until the reader scrolls up. */
let following = true;
page.addEventListener("scroll", () => {
  following = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX;
});

/** A copy of the element in the template called `name`. */
export function copyOf(name) {
  return document.getElementById(`${name}-template`).content.firstElementChild.cloneNode(true);
}

/** What shows an attachment: a waveform, a picture, a video, or its name where the browser cannot read it. */
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
      : Object.assign(document.createElement("video"), { src: url, controls: true, muted: true, title: name });
  // The server may know the format nevertheless.
  shown.addEventListener("error", () => {
    shown.replaceWith(label);
    discard(attachment);
  });
  return shown;
}

/** One question and its answer. */
export class TurnView {
  #turn = copyOf("turn");
  #clip = null;
  #answer = null;
  #drawing = null;

  constructor({ text, attachments }, list) {
    const question = this.#turn.querySelector(".question");
    question.querySelector(".text").textContent = text;
    question.querySelector(".text").hidden = !text;
    question.querySelector(".media").append(...attachments.map(attachmentView));
    question.querySelector(".media").hidden = attachments.length === 0;
    for (const details of list.querySelectorAll("details")) details.open = false;
    list.append(this.#turn);
    this.#scroll(true);
  }

  /** The server has accepted the request. */
  begin(answer, requestId) {
    this.#answer = answer;
    const times = this.#part(".times");
    times.hidden = false;
    times.open = true;
    this.#part(".request-id").textContent = requestId ? `Request ${requestId}` : "";
    this.#drawing = setInterval(() => this.#draw(), REDRAW_MS);
    this.#draw();
  }

  text(text) {
    this.#part(".thinking")?.remove();
    const shown = this.#part(".text");
    shown.append(shown.textContent === "" ? text.trimStart() : text);
    this.#scroll();
  }

  /** `playback` plays what `sound` will get. */
  playing(playback) {
    const element = copyOf("clip");
    this.#part(".sound").append(element);
    this.#clip = new Clip(element, ANSWER_RATE_HZ, "the answer");
    this.#clip.follow(playback);
  }

  sound(samples) {
    this.#clip.add(samples);
  }

  note(text) {
    this.#part(".note").textContent = text;
    this.#part(".note").hidden = false;
  }

  /** All has arrived, or nothing more will. */
  complete() {
    this.#part(".thinking")?.remove();
    this.#part("").setAttribute("aria-busy", "false");
    this.#draw();
  }

  /** Nothing is heard any more either. */
  end() {
    clearInterval(this.#drawing);
    this.#draw();
    this.#scroll();
  }

  fail(message, retry) {
    const failure = this.#part(".failure");
    failure.hidden = false;
    failure.querySelector("p").textContent = message;
    failure.querySelector("button").addEventListener("click", retry, { once: true });
    this.#scroll(true);
  }

  remove() {
    clearInterval(this.#drawing);
    this.#turn.remove();
  }

  withoutRetry() {
    this.#part(".retry").hidden = true;
  }

  #draw() {
    this.#clip?.draw();
    if (this.#answer === null) return;
    this.#answer.updatePlayed();
    const { timings } = this.#answer;
    this.#time(".first-text", timings.text[0] ?? null);
    this.#time(".first-sound", timings.sound[0] ?? null);
    this.#time(".total", timings.ended);
    drawTimeline(this.#part(".timeline"), timings);
    this.#scroll();
  }

  #time(selector, time) {
    const element = this.#part(selector);
    element.hidden = time === null;
    if (time !== null) element.querySelector("b").textContent = formatSeconds(this.#answer.timings.since(time));
  }

  #part(selector) {
    return this.#turn.querySelector(`.answer ${selector}`.trim());
  }

  #scroll(always = false) {
    if (always || following) page.scrollTop = page.scrollHeight;
  }
}
