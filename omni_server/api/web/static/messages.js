// What has been said in a chat, as the API's messages.

export class Messages {
  #turns = [];

  /**
   * Begins a turn. `attachments` are those of attachments.js, `answer` is an `Answer` that may still be
   * growing.
   */
  ask(text, attachments, answer) {
    const turn = { text, attachments, answer };
    this.#turns.push(turn);
    return turn;
  }

  /** A turn of an earlier visit, of which the text is left: see chat_store.js. */
  restore({ question, media, answer }) {
    const text = withoutMedia(
      question,
      media.map(({ kind }) => kind),
    );
    this.#turns.push({ text, attachments: [], answer: { text: answer, audioId: null } });
  }

  /** Takes back a turn that has failed: the model has not answered it, and should not hear it twice. */
  drop(turn) {
    this.#turns = this.#turns.filter((other) => other !== turn);
  }

  /**
   * The body's `messages`: the instructions, all that was said, and the last question. The server knows its
   * spoken answers by their id.
   */
  list(instructions) {
    const system = instructions ? [{ role: "system", content: instructions }] : [];
    const said = this.#turns.slice(0, -1).filter(({ answer }) => answer.text !== "");
    const earlier = said.flatMap((turn) => [questionOf(turn), messageOf(turn.answer)]);
    return [...system, ...earlier, questionOf(this.#turns.at(-1))];
  }

  /**
   * Servers limit how many media one prompt may hold. Takes those of the oldest earlier question out of what
   * will be sent; false if there are none.
   */
  forgetOldestMedia() {
    const oldest = this.#turns.slice(0, -1).find((turn) => turn.attachments.length > 0);
    if (!oldest) return false;
    oldest.text = withoutMedia(
      oldest.text,
      oldest.attachments.map(({ kind }) => kind),
    );
    oldest.attachments = [];
    return true;
  }
}

function withoutMedia(text, kinds) {
  return [...kinds.map((kind) => `[${kind}, no longer available]`), text].join(" ").trim();
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
