// What has been said, as the API's messages.

export class Conversation {
  #turns = [];

  /** Begins a turn. `attachments` are those of attachments.js. */
  ask(text, attachments) {
    const turn = { text, attachments, answer: null };
    this.#turns.push(turn);
    return turn;
  }

  /** Takes back a turn that has failed: the model has not answered it, and should not hear it twice. */
  drop(turn) {
    this.#turns = this.#turns.filter((other) => other !== turn);
  }

  get isEmpty() {
    return this.#turns.length === 0;
  }

  /** The body's `messages`. The server knows its spoken answers by their id. */
  messages() {
    return this.#turns.flatMap((turn) => {
      const question = { role: "user", content: contentOf(turn) };
      return turn.answer ? [question, messageOf(turn.answer)] : [question];
    });
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

function contentOf({ text, attachments }) {
  if (attachments.length === 0) return text;
  const parts = attachments.map(({ part }) => part);
  return text ? [...parts, { type: "text", text }] : parts;
}

/** The transcript goes along for the case that the id has expired or the server has been restarted. */
function messageOf({ audioId, text }) {
  return audioId
    ? { role: "assistant", audio: { id: audioId, transcript: text } }
    : { role: "assistant", content: text };
}
