// What has been said, as the API's messages.

export class Conversation {
  #turns = [];

  /** Begins a turn. `attachments` are those of attachments.js, `answer` is an `Answer` that may still be growing. */
  ask(text, attachments, answer) {
    const turn = { text, attachments, answer };
    this.#turns.push(turn);
    return turn;
  }

  /** Takes back a turn that has failed: the model has not answered it, and should not hear it twice. */
  drop(turn) {
    this.#turns = this.#turns.filter((other) => other !== turn);
  }

  /** The body's `messages`: all that was said, and the last question. The server knows its spoken answers by their id. */
  messages() {
    const said = this.#turns.slice(0, -1).filter(({ answer }) => answer.text !== "");
    return [...said.flatMap((turn) => [questionOf(turn), messageOf(turn.answer)]), questionOf(this.#turns.at(-1))];
  }

  /**
   * Servers limit how many media one prompt may hold. Takes those of the oldest earlier question out of what will be
   * sent; false if there are none.
   */
  forgetOldestMedia() {
    const oldest = this.#turns.slice(0, -1).find((turn) => turn.attachments.length > 0);
    if (!oldest) return false;
    oldest.text = [...oldest.attachments.map(({ kind }) => `[${kind}, no longer available]`), oldest.text].join(" ").trim();
    oldest.attachments = [];
    return true;
  }
}

function questionOf({ text, attachments }) {
  if (attachments.length === 0) return { role: "user", content: text };
  const parts = attachments.map(({ part }) => part);
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}

/** The transcript goes along for the case that the id has expired or the server has been restarted. */
function messageOf({ audioId, text }) {
  return audioId
    ? { role: "assistant", audio: { id: audioId, transcript: text } }
    : { role: "assistant", content: text };
}
