// The dialog with the settings. Each change counts at once.

import { element } from "./page.js";
import { settings } from "./settings.js";

/**
 * Input by id: the setting that it shows, and how its text is read. An empty number leaves the choice to the
 * server.
 */
const FIELDS = {
  instructions: ["instructions", (input) => input.value],
  temperature: ["temperature", numberOf],
  "max-tokens": ["maxTokens", numberOf],
};

function numberOf(input) {
  return input.value.trim() === "" ? null : Number(input.value);
}

for (const [id, [name, read]] of Object.entries(FIELDS)) {
  const input = element(id);
  input.addEventListener("input", () => {
    const isValid = input.checkValidity();
    input.ariaInvalid = String(!isValid);
    if (isValid) settings.change({ [name]: read(input) });
  });
}

function fill() {
  for (const [id, [name]] of Object.entries(FIELDS)) {
    element(id).value = settings.get()[name] ?? "";
    element(id).ariaInvalid = "false";
  }
}

element("settings-button").addEventListener("click", () => {
  fill();
  element("settings-dialog").showModal();
});
element("settings-reset").addEventListener("click", () => {
  settings.reset();
  fill();
});
