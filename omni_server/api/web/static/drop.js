// Files that are dragged to the page: what becomes of them depends on the tab.

import { composer } from "./composer.js";
import { imageInputs } from "./image_inputs.js";
import { element } from "./page.js";
import { openTab } from "./tabs.js";
import { transcribeFile } from "./transcribe.js";

/** By tab: what is said while files are above it, and who takes them. */
const TAKERS = {
  chat: ["Drop to attach", (files) => composer.attach(files)],
  transcribe: ["Drop to transcribe", ([file]) => transcribeFile(file)],
  images: ["Drop to edit", (files) => imageInputs.add(files)],
};

let depth = 0; // drags enter and leave every element on their way

function dragged(event, change) {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault(); // the browser would leave the page for the file
  depth = Math.max(0, depth + change);
  const taker = TAKERS[openTab()];
  element("drop").hidden = depth === 0 || !taker;
  if (taker) element("drop-text").textContent = taker[0];
}

document.addEventListener("dragenter", (event) => dragged(event, 1));
document.addEventListener("dragleave", (event) => dragged(event, -1));
document.addEventListener("dragover", (event) => dragged(event, 0));
document.addEventListener("drop", (event) => {
  dragged(event, -depth);
  const files = [...(event.dataTransfer?.files ?? [])];
  if (files.length > 0) TAKERS[openTab()]?.[1](files);
});
