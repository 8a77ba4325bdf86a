// Asks for the API key.

import { ApiError, apiKey } from "./api.js";
import { element } from "./page.js";

let asking = null;

/** Resolves to true when a key has been given (an empty one forgets it), to false if not. */
export function askForKey(reason) {
  asking ??= openDialog(reason).finally(() => (asking = null));
  return asking;
}

function openDialog(reason) {
  const dialog = element("key-dialog");
  element("key-reason").textContent = reason;
  element("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    element("key-cancel").onclick = () => dialog.close("");
    element("key-form").onsubmit = (event) => {
      event.preventDefault();
      dialog.close("given");
    };
    dialog.onclose = () => {
      const given = dialog.returnValue === "given";
      if (given) apiKey.set(element("key").value.trim());
      element("key").value = "";
      resolve(given);
    };
  });
}

/**
 * The result of `request`, which is repeated with another key for as long as the server refuses it and one is
 * given.
 */
export async function withKey(request) {
  for (;;) {
    try {
      return await request();
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 401) throw error;
      element("key-button").hidden = false;
      const reason = apiKey.get()
        ? "The server has refused this key. Try another one."
        : "This server requires an API key.";
      if (!(await askForKey(reason))) throw error;
    }
  }
}
