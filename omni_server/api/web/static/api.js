// The server's API as this page uses it.

import { readEvents } from "./sse.js";

const KEY_ITEM = "omni-server.api-key";

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

/** What is served: `{id, voices: [{id, name}], inputs}`; `voices` is empty for a model that cannot speak. */
export async function describeModel() {
  const { data } = await (await request("v1/models")).json();
  const model = data[0];
  const speaks = model.modalities?.output?.includes("audio") ?? true;
  return {
    id: model.id,
    voices: speaks ? ((await listVoices()) ?? (model.voices ?? []).map((id) => ({ id, name: id }))) : [],
    inputs: model.modalities?.input ?? ["text", "audio", "image", "video"],
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

/**
 * Asks for an answer. Resolves when the server has accepted the request, to its id and the answer's chunks.
 * Both throw `ApiError`, or an `AbortError` after `signal`.
 */
export async function startAnswer(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  return { requestId: response.headers.get("x-request-id"), chunks: readChunks(response.body) };
}

async function* readChunks(body) {
  try {
    for await (const data of readEvents(body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, { code: chunk.error.code });
      yield chunk;
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError("The connection to the server was lost.");
    if (error instanceof SyntaxError) throw new ApiError("The answer is damaged: it holds no valid JSON.");
    throw error;
  }
  throw new ApiError("The connection ended before the answer was complete.");
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
    return new ApiError(`The server answered with status ${response.status}.`, { status: response.status });
  }
}
