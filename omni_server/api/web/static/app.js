// The page: starts its parts, and shows whether the server is there.

import "./about.js";
import { apiKey } from "./api.js";
import { stop } from "./chat.js";
import { composer } from "./composer.js";
import "./conversation.js";
import "./dialogs.js";
import "./drop.js";
import "./images.js";
import { askForKey } from "./key_dialog.js";
import "./own_voices.js";
import { element } from "./page.js";
import "./read_aloud.js";
import { served } from "./served.js";
import { offerTabs } from "./tabs.js";
import "./transcribe.js";

function showState() {
  const text = served.isReady ? served.model.id : served.problem;
  element("state").dataset.state = served.isReady ? "ready" : "waiting";
  element("state-text").textContent = text;
  element("state").title = text;
  if (served.model === null) return;
  const { answers, voices, clonesVoices, inputs, images } = served.model;
  const speaks = voices.length > 0 || clonesVoices;
  const hears = inputs.includes("audio");
  offerTabs({
    chat: answers,
    conversation: speaks && hears,
    "read-aloud": speaks,
    transcribe: hears,
    images: images !== null,
  });
  element("settings-button").hidden = !answers;
}

element("key-button").addEventListener("click", async () => {
  if (await askForKey("Leave it empty to forget the key.")) served.connect();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) composer.cancelRecording() || stop();
});

element("key-button").hidden = apiKey.get() === "";
served.watch(showState);
served.connect();
