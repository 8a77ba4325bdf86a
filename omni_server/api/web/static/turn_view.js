// Turns of the chat on the page.

import { attachmentView } from "./attachments.js";
import { Clip } from "./clip.js";
import { copyButton, copyOf, element } from "./page.js";
import { ANSWER_RATE_HZ } from "./playback.js";
import { chatAsCurl, chatAsPython } from "./program_text.js";
import { drawTimeline, formatSeconds, preparing } from "./timings.js";

const REDRAW_MS = 120;
const NEAR_PX = 80;

const page = element("chat-scroll");
/** Whether the end is to stay in view: from the first question until the reader scrolls up. */
let following = false;
page.addEventListener("scroll", () => {
  following = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX;
});
// A phone's keyboard takes half of the page.
new ResizeObserver(() => following && scrollToEnd()).observe(page);

function scrollToEnd() {
  page.scrollTop = page.scrollHeight;
}

/** One question and its answer. */
export class TurnView {
  #turn = copyOf("turn");
  #clip = null;
  #answer = null;
  #isSpoken = false;
  #drawing = null;

  constructor({ text, attachments }, list) {
    const question = this.#turn.querySelector(".question");
    question.querySelector(".text").textContent = text;
    question.querySelector(".text").hidden = !text;
    question.querySelector(".media").append(...attachments.map(attachmentView));
    question.querySelector(".media").hidden = attachments.length === 0;
    list.append(this.#turn);
    this.#scroll(true);
  }

  /** Shows the text of an answer of an earlier visit. */
  restore(text) {
    this.text(text);
    this.complete();
  }

  /** The server has accepted the request, which was `body`. */
  begin(answer, requestId, body) {
    this.#answer = answer;
    this.#isSpoken = body.modalities.includes("audio");
    this.#part(".times").hidden = false;
    this.#part(".copies").hidden = false;
    copyButton(this.#part(".as-curl"), () => chatAsCurl(body));
    copyButton(this.#part(".as-python"), () => chatAsPython(body));
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

  /** `playback` plays what `audio` will get. */
  playing(playback) {
    const element = copyOf("clip");
    this.#part(".audio").append(element);
    this.#clip = new Clip(element, ANSWER_RATE_HZ, "the answer");
    this.#clip.follow(playback);
  }

  audio(samples) {
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
    this.#time(".first-audio", timings.audio[0] ?? null);
    this.#time(".total", timings.ended);
    const isPreparing =
      this.#isSpoken && timings.text.length > 0 && timings.audio.length === 0 && timings.ended === null;
    this.#part(".preparing").hidden = !isPreparing;
    this.#part(".preparing").textContent = preparing(timings.since(performance.now()));
    drawTimeline(this.#part(".timeline"), timings);
    this.#scroll();
  }

  #time(selector, time) {
    const element = this.#part(selector);
    element.hidden = time === null;
    if (time !== null)
      element.querySelector("b").textContent = formatSeconds(this.#answer.timings.since(time));
  }

  #part(selector) {
    return this.#turn.querySelector(`.answer ${selector}`.trim());
  }

  #scroll(always = false) {
    following ||= always;
    if (following) scrollToEnd();
  }
}
