// What the model's folder says of it: a plain notice, and questions that it can answer.

import { ask } from "./chat.js";
import { element, show } from "./page.js";
import { served } from "./served.js";

/** They suit any model that speaks. */
const EXAMPLE_PROMPTS = ["Hello! Who are you?", "What can you do?", "Tell me a short story."];

served.watch(() => {
  if (served.model === null) return;
  const { about } = served.model;
  show("banner", about?.notice ?? "");
  const prompts = about?.example_prompts.length ? about.example_prompts : EXAMPLE_PROMPTS;
  element("examples").replaceChildren(...prompts.map(exampleButton));
  for (const button of element("examples").children) button.disabled = !served.isReady;
});

function exampleButton(prompt) {
  const button = Object.assign(document.createElement("button"), {
    type: "button",
    className: "quiet",
    textContent: prompt,
  });
  button.addEventListener("click", () => ask(prompt, []));
  return button;
}
