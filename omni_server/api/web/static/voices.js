// The choice of a voice, which is one for the whole page however often it is shown.

import { served } from "./served.js";
import { settings } from "./settings.js";

const selects = document.querySelectorAll("select.voice");

/**
 * The id of the chosen voice; the first one where another model has been served before. Null if there is
 * none.
 */
export function voiceOf({ voices }) {
  const chosen = voices.find(({ id }) => id === settings.get().voice) ?? voices[0];
  return chosen?.id ?? null;
}

function fill() {
  if (served.model === null) return;
  const { voices } = served.model;
  for (const select of selects) select.replaceChildren(...voices.map(({ id, name }) => new Option(name, id)));
  for (const option of document.querySelectorAll(".voice-option")) option.hidden = voices.length === 0;
  choose();
}

function choose() {
  if (served.model === null) return;
  for (const select of selects) select.value = voiceOf(served.model) ?? "";
}

for (const select of selects)
  select.addEventListener("change", () => settings.change({ voice: select.value }));
served.watch(fill);
settings.watch(choose);
