// The server's API as this page uses it.

const KEY_ITEM = "omni-server.api-key";
const WORDS = {
  413: "This is larger than what the server takes",
  429: "The server has too much to do; try again in a moment",
  502: "The server cannot be reached at the moment",
  503: "The server cannot answer at the moment",
  504: "The server took too long",
};

/** A refusal or failure that the server, or the way to it, has put into words. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.name = "ApiError";
    /** HTTP status; 0 where no answer came, or where it came within a stream. */
    this.status = status;
    this.code = code;
  }
}

/** The API key lives as long as the tab. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY_ITEM) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY_ITEM, key) : sessionStorage.removeItem(KEY_ITEM)),
};

/**
 * What is served: `{id, answers, hearsSpeech, maxSpeechCharacters, voices: [{id, name, uploaded}], clonesVoices,
 * inputs, images, about}`; `answers` is false for one that writes no text, `hearsSpeech` for one that does not
 * understand what it hears, `voices` is empty for one that cannot speak, `images` are those of the API, and `about`
 * is `{notice, example_prompts}`; both may be null.
 */
export async function describeModel() {
  const { data } = await (await request("v1/models")).json();
  const model = data[0];
  const speaks = model.modalities?.output?.includes("audio") ?? true;
  return {
    id: model.id,
    answers: model.modalities?.output?.includes("text") ?? true,
    hearsSpeech: model.about?.understands_speech ?? true,
    maxSpeechCharacters: model.max_speech_characters,
    voices: speaks ? ((await listVoices()) ?? (model.voices ?? []).map((id) => ({ id, name: id }))) : [],
    clonesVoices: model.clones_voices ?? false,
    inputs: model.modalities?.input ?? ["text", "audio", "image", "video"],
    images: model.images ?? null,
    about: model.about ?? null,
  };
}

/** The model's own voices, not their aliases; null where the server has no list of voices. */
async function listVoices() {
  try {
    const { voices } = await (await request("v1/audio/voices")).json();
    return voices.filter((voice) => voice.alias_of == null);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}

/** Makes a voice of a recording. Resolves to `{id, name}`. Throws `ApiError`. */
export async function addVoice(file, fields) {
  const form = formOf(fields);
  form.set("audio_sample", file, file.name);
  return (await request("v1/audio/voices", { method: "POST", body: form })).json();
}

/** Throws `ApiError`. */
export async function deleteVoice(name) {
  await request(`v1/audio/voices/${encodeURIComponent(name)}`, { method: "DELETE" });
}

/**
 * Asks for an answer. Resolves when the server has accepted the request, to its id and the answer's chunks.
 * Both throw `ApiError`, or an `AbortError` after `signal`.
 */
export async function startAnswer(body, signal) {
  const response = await postJson("v1/chat/completions", { ...body, stream: true }, signal);
  const chunks = readJsonEvents(response.body);
  return { requestId: response.headers.get("x-request-id"), chunks };
}

/**
 * Has a text read aloud. Yields the bytes of the file as they come. Throws `ApiError`, or an `AbortError`
 * after `signal`.
 */
export async function* readAloud(body, signal) {
  const response = await postJson("v1/audio/speech", { ...body, stream: true }, signal);
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    throw inWords(error);
  }
}

/** Transcribes an audio file. Yields the text piece by piece. Throws as `readAloud` does. */
export async function* transcribe(file, model, signal) {
  const form = new FormData();
  form.set("model", model);
  form.set("stream", "true");
  form.set("file", file, file.name);
  const response = await request("v1/audio/transcriptions", { method: "POST", body: form, signal });
  for await (const event of readJsonEvents(response.body)) {
    if (event.type === "transcript.text.delta") yield event.delta;
    if (event.type === "transcript.text.done") return;
  }
}

/**
 * Has an image made, or `files` edited. Yields the events of the stream: previews, and last the image. Throws
 * as `readAloud` does.
 */
export async function* makeImage(body, files, signal) {
  const fields = { ...body, stream: true };
  const response =
    files.length === 0
      ? await postJson("v1/images/generations", fields, signal)
      : await request("v1/images/edits", { method: "POST", body: imageForm(fields, files), signal });
  for await (const event of readJsonEvents(response.body)) {
    yield event;
    if (event.type.endsWith(".completed")) return;
  }
}

function formOf(fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.set(name, value);
  return form;
}

function imageForm(fields, files) {
  const form = formOf(fields);
  for (const file of files) form.append("image[]", file, file.name);
  return form;
}

/** The events of `body`. Throws `ApiError` where it ends without the reader having seen the last one. */
async function* readJsonEvents(body) {
  try {
    for await (const data of readEvents(body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, { code: event.error.code });
      yield event;
    }
  } catch (error) {
    throw inWords(error);
  }
  throw new ApiError("The connection ended before the answer was complete.");
}

/** What broke off a response that had begun. */
function inWords(error) {
  if (error instanceof TypeError) return new ApiError("The connection to the server was lost.");
  if (error instanceof SyntaxError) return new ApiError("The answer is damaged: it holds no valid JSON.");
  return error;
}

function postJson(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Addresses are relative to the page, so that it also works below a path of a reverse proxy. */
async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (apiKey.get()) headers.set("Authorization", `Bearer ${apiKey.get()}`);
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return new ApiError(message, { status: response.status, code });
  } catch {
    // Not this server's words: a proxy has answered.
    return new ApiError(`${WORDS[response.status] ?? "The server answered"} (status ${response.status}).`, {
      status: response.status,
    });
  }
}

/**
 * The data of each server-sent event, as strings: EventSource cannot send a POST request. Comments (the
 * server's keep-alives) and other fields are skipped.
 * @param {ReadableStream<Uint8Array>} body
 */
async function* readEvents(body) {
  let data = [];
  for await (const line of readLines(body)) {
    if (line === "") {
      if (data.length > 0) yield data.join("\n");
      data = [];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

async function* readLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield line.endsWith("\r") ? line.slice(0, -1) : line;
    }
  } finally {
    // Leaving early ends the request. A stream that has failed has said so already.
    await reader.cancel().catch(() => {});
  }
}
