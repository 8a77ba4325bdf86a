// The WebSocket of a spoken conversation: JSON events in both directions.

import { ApiError, apiKey } from "./api.js";

const REFUSED =
  "The server did not open a conversation. It may have as many as it can hold; try again in a minute. " +
  "If it never works, a proxy between here and the server may not let WebSockets through.";
const LOST = "The connection to the server was lost.";

export class RealtimeSocket {
  #socket;

  /**
   * `onEvent` gets each of the server's events. `onClose` is called once if the connection ends by itself,
   * with the reason in words. Resolves when events may be sent. Throws `ApiError`.
   */
  static async open(model, onEvent, onClose) {
    const socket = new RealtimeSocket();
    await socket.#connect(model, onEvent, onClose);
    return socket;
  }

  send(event) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(event));
  }

  close() {
    this.#socket.onclose = this.#socket.onmessage = null;
    this.#socket.close(1000);
  }

  #connect(model, onEvent, onClose) {
    const url = new URL("v1/realtime", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    url.searchParams.set("model", model);
    try {
      this.#socket = new WebSocket(url, protocols());
    } catch {
      throw new ApiError("This API key holds characters that browsers cannot send with a WebSocket.");
    }
    return new Promise((resolve, reject) => {
      // Browsers keep the status and the body of a refused upgrade to themselves.
      this.#socket.onclose = () => reject(new ApiError(REFUSED));
      this.#socket.onmessage = ({ data }) => onEvent(JSON.parse(data));
      this.#socket.onopen = () => {
        this.#socket.onclose = ({ reason }) => onClose(reason || LOST);
        resolve();
      };
    });
  }
}

/** Browsers cannot set headers here: the key travels among the subprotocols. */
function protocols() {
  const key = apiKey.get();
  return key ? ["realtime", `openai-insecure-api-key.${key}`] : ["realtime"];
}
