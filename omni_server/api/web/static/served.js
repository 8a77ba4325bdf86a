// What is served, and whether the server takes questions: asked for until the server says so.

import { ApiError, describeModel } from "./api.js";
import { withKey } from "./key_dialog.js";

const RETRY_MS = 2000;

const listeners = [];
let asking = null;

export const served = {
  /** See `describeModel`; null until the server has said so. */
  model: null,
  /** Whether the server takes questions, as far as is known. */
  isReady: false,
  /** Why it does not, in words. */
  problem: "Connecting",

  /** `listener` is called now and whenever something has changed. */
  watch(listener) {
    listeners.push(listener);
    listener();
  },

  /** Asks again. */
  connect() {
    asking ??= ask().finally(() => (asking = null));
  },

  /**
   * To be called after a failed request: another model may be served by now, or none. Whoever would not give
   * a key is not asked again at once.
   */
  doubt(error) {
    if (error.status !== 400 && error.status !== 401 && error.status !== 413) served.connect();
  },
};

async function ask() {
  served.isReady = false;
  tell();
  for (;;) {
    try {
      served.model = await withKey(describeModel);
      served.isReady = true;
      return tell();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      served.problem = error.message;
      tell();
      if (error.status === 401) return; // the button asks again
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function tell() {
  for (const listener of listeners) listener();
}
