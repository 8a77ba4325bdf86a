// A hands-free conversation over /v1/realtime: sends what the microphone hears, plays the answers, lets
// itself be interrupted. The server finds out who speaks when; this is what the page makes of it.

import { Microphone, loudness } from "./microphone.js";
import { encodePcm, toInt16 } from "./samples.js";
import { RealtimeSocket } from "./realtime_socket.js";
import { Resampler } from "./resampler.js";
import { SpokenAnswer } from "./spoken_answer.js";

const RATE_HZ = 24_000;
/** Of races that every conversation has: the answer had ended just before it was interrupted. */
const HARMLESS = new Set([
  "response_cancel_not_active",
  "item_already_truncated",
  "item_truncate_invalid_item_id",
]);
/** The connection ends after them. */
const LAST_WORDS = new Set(["session_expired", "server_shutting_down", "client_too_slow"]);

export class LiveConversation {
  #view;
  #socket = null;
  #microphone = null;
  #resampler = null;
  #isOver = false;
  #isUserSpeaking = false;
  /** The user has finished a turn, and no answer to it has begun. */
  #isAnswerDue = false;
  #responseId = null;
  /** The answer that is heard, or will be. */
  #answer = null;
  /** What the server says of its end, which follows. */
  #lastWords = null;

  /**
   * `view` is told of everything: `state(name)`, `level(loudness)`, `userTurn(itemId)`, `userText(itemId,
   * text)`, `answerText(itemId, text)`, `cutShort(itemId)`, `problem(text)`, `ended(reason)`.
   */
  constructor(view) {
    this.#view = view;
  }

  /** Resolves when the server listens. Throws `MicrophoneError` and `ApiError`. */
  async start(model, session) {
    this.#view.state("connecting");
    try {
      this.#microphone = await Microphone.open(
        (piece) => this.#hear(piece),
        () => this.#end("The microphone was disconnected."),
      );
      if (this.#isOver) return this.#release();
      this.#socket = await RealtimeSocket.open(
        model,
        (event) => this.#take(event),
        (reason) => this.#end(this.#lastWords ?? reason),
      );
    } catch (error) {
      this.#isOver = true;
      this.#release();
      throw error;
    }
    if (this.#isOver) return this.#release();
    this.configure(session);
    this.#showState();
  }

  /** What answers are like from now on, as the session object of the API. */
  configure(session) {
    this.#socket?.send({ type: "session.update", session: { type: "realtime", ...session } });
  }

  /** Ends the answer in mid-sentence, without a word of the user. */
  interrupt() {
    if (this.#responseId !== null) {
      this.#socket.send({ type: "response.cancel", response_id: this.#responseId });
    }
    this.#responseId = null;
    this.#isAnswerDue = false;
    this.#cutShort();
    this.#showState();
  }

  stop() {
    this.#end(null);
  }

  #hear(piece) {
    if (this.#isOver || this.#socket === null) return;
    this.#view.level(loudness(piece));
    this.#resampler ??= new Resampler(this.#microphone.rateHz, RATE_HZ);
    const samples = this.#resampler.push(piece);
    this.#socket.send({ type: "input_audio_buffer.append", audio: encodePcm(toInt16(samples)) });
  }

  #take(event) {
    switch (event.type) {
      case "input_audio_buffer.speech_started":
        this.#isUserSpeaking = true;
        this.#cutShort();
        this.#view.userTurn(event.item_id);
        break;
      case "input_audio_buffer.speech_stopped":
        this.#isUserSpeaking = false;
        this.#isAnswerDue = true;
        break;
      case "conversation.item.input_audio_transcription.completed":
        this.#view.userText(event.item_id, event.transcript);
        break;
      case "response.created":
        this.#isAnswerDue = false;
        this.#responseId = event.response.id;
        break;
      case "response.output_item.added":
        if (event.response_id !== this.#responseId) break; // it was interrupted before it came
        this.#answer?.stop();
        this.#answer = new SpokenAnswer(event.item.id, () => this.#showState());
        break;
      case "response.output_audio_transcript.delta":
        this.#view.answerText(event.item_id, event.delta);
        break;
      case "response.output_audio.delta":
        if (this.#isCurrent(event)) this.#answer.add(event.delta);
        break;
      case "response.output_audio.done":
        if (this.#isCurrent(event)) this.#answer.end();
        break;
      case "response.done":
        if (event.response.id === this.#responseId) this.#responseId = null;
        this.#tellOutcome(event.response);
        break;
      case "error":
        this.#tellError(event.error);
        break;
    }
    this.#showState();
  }

  #isCurrent(event) {
    return this.#answer?.itemId === event.item_id;
  }

  /**
   * The answer falls silent, and the server learns how much of it was heard: the model should not believe
   * more.
   */
  #cutShort() {
    const answer = this.#answer;
    this.#answer = null;
    if (answer === null || answer.isOver) return;
    const audio_end_ms = answer.heardMs;
    answer.stop();
    this.#socket.send({
      type: "conversation.item.truncate",
      item_id: answer.itemId,
      content_index: 0,
      audio_end_ms,
    });
    this.#view.cutShort(answer.itemId);
  }

  #tellOutcome({ status, status_details: details }) {
    if (status === "failed") this.#view.problem(details?.error?.message ?? "The answer failed.");
    if (status === "incomplete") this.#view.problem("The answer was cut off at the length limit.");
  }

  #tellError({ code, message }) {
    if (HARMLESS.has(code)) return;
    this.#isAnswerDue = false;
    if (LAST_WORDS.has(code)) this.#lastWords = message;
    else this.#view.problem(message);
  }

  #showState() {
    if (this.#isOver) return;
    if (this.#isUserSpeaking) this.#view.state("hearing");
    else if (this.#answer?.isPlaying) this.#view.state("speaking");
    else if (this.#isAnswerDue || this.#responseId !== null) this.#view.state("thinking");
    else this.#view.state("listening");
  }

  /** `reason` is null where the user wanted it. */
  #end(reason) {
    if (this.#isOver) return;
    this.#isOver = true;
    this.#release();
    this.#view.ended(reason);
  }

  #release() {
    this.#answer?.stop();
    this.#microphone?.close();
    this.#socket?.close();
  }
}
