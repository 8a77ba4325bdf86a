// The tab that makes and edits images.

import { ApiError, makeImage } from "./api.js";
import { imageInputs } from "./image_inputs.js";
import { withKey } from "./key_dialog.js";
import { download, element, show } from "./page.js";
import { served } from "./served.js";
import { settings } from "./settings.js";
import { formatSeconds } from "./timings.js";

/** By what the model can do: the heading, and what belongs into the prompt. */
const WORDS = {
  makes: ["Make an image", "What the image shows"],
  edits: ["Edit images", "What to change"],
  both: ["Make or edit an image", "What the image shows, or what to change"],
};
const MAX_PREVIEWS = 3;
const NUM_RANDOM_SEEDS = 2 ** 32;
const OTHER_SIZE = "other";

/** Ends the image that is being made; null if there is none. */
let abort = null;
/** The last complete image: `{blob, name}`. */
let file = null;

/** The body of a request, without fields that are empty, or disabled because the model does not have them. */
function body() {
  const steps = textOf("image-steps");
  const negative = textOf("image-negative");
  return {
    model: served.model.id,
    prompt: textOf("image-prompt"),
    size: chosenSize(),
    seed: Number(textOf("image-seed") || randomSeed()),
    ...(steps && { num_inference_steps: Number(steps) }),
    ...(negative && { negative_prompt: negative }),
    ...(showsPreviews() && { partial_images: MAX_PREVIEWS }),
  };
}

function textOf(id) {
  return element(id).disabled ? "" : element(id).value.trim();
}

/** Chosen here and not by the server, so that it can be shown. */
function randomSeed() {
  return Math.floor(Math.random() * NUM_RANDOM_SEEDS);
}

function chosenSize() {
  const size = element("image-size").value;
  return size === OTHER_SIZE ? `${textOf("image-width")}x${textOf("image-height")}` : size;
}

function showsPreviews() {
  return element("image-previews").checked && !element("image-previews").disabled;
}

// --- an image that is being made
// ------------------------------------------------------------------------------------------

async function make() {
  const own = new AbortController();
  file = null;
  showImage(null);
  show("image-problem", "");
  showStatus("The image is being made.");
  element("image-download").hidden = true;
  setCurrent(own);
  const asked = body();
  try {
    await withKey(() => follow(asked, imageInputs.files(), own.signal));
  } catch (error) {
    if (error.name === "AbortError") {
      showStatus("Stopped.");
    } else {
      if (!(error instanceof ApiError)) throw error;
      showImage(null);
      showStatus("");
      show("image-problem", error.message);
      served.doubt(error);
    }
  } finally {
    setCurrent(null);
  }
}

/** Shows the previews and the image. */
async function follow(asked, files, signal) {
  const began = performance.now();
  for await (const event of makeImage(asked, files, signal)) {
    const blob = blobOf(event);
    showImage(blob, asked.prompt);
    if ("partial_image_index" in event) {
      showPreview(event.partial_image_index + 1);
      continue;
    }
    const seconds = (performance.now() - began) / 1000;
    showStatus(`${event.size} pixels, seed ${asked.seed}, made in ${formatSeconds(seconds)}`);
    offer({ blob, name: `image-${asked.seed}.png` });
  }
}

function blobOf({ b64_json: data, output_format: format }) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: `image/${format}` });
}

/** Null shows none. The first one is scrolled into view. */
function showImage(blob, prompt = "") {
  const image = element("image-result");
  if (image.hidden) {
    image.addEventListener("load", () => image.scrollIntoView({ block: "nearest" }), { once: true });
  }
  URL.revokeObjectURL(image.src);
  image.hidden = blob === null;
  image.alt = prompt;
  if (blob === null) image.removeAttribute("src");
  else image.src = URL.createObjectURL(blob);
}

/** Previews divide the steps into equal parts. */
function showPreview(number) {
  element("image-progress").value = number / (MAX_PREVIEWS + 1);
  showStatus(`Preview ${number}`);
}

function showStatus(text) {
  element("image-status").textContent = text;
}

function offer(made) {
  file = made;
  element("image-download").hidden = false;
  element("image-download").textContent = `Download ${made.name}`;
}

/** The focus goes from the button that starts to the one that stops, and back. */
function setCurrent(controller) {
  const buttons = [element("image-start"), element("image-stop")];
  const isFocused = buttons.includes(document.activeElement);
  abort = controller;
  element("image-progress").removeAttribute("value");
  element("image-progress").hidden = abort === null;
  updateButtons();
  if (isFocused) buttons.find((button) => !button.hidden).focus();
}

// --- what there is to choose
// ------------------------------------------------------------------------------------------

function updateButtons() {
  const isMaking = abort !== null;
  const hasInputs = imageInputs.files().length > 0;
  const needsInputs = served.model?.images?.needs_input_image ?? false;
  element("image-start").hidden = isMaking;
  element("image-stop").hidden = !isMaking;
  element("image-start").textContent = hasInputs || needsInputs ? "Edit" : "Make the image";
  // Enter in a field would start another one.
  element("image-start").disabled =
    isMaking ||
    (needsInputs && !hasInputs) ||
    !served.model?.images ||
    !served.isReady ||
    textOf("image-prompt") === "";
}

function offerWhatIsServed() {
  updateButtons();
  if (!served.model?.images) return;
  const { sizes, free_sizes: free, parameters, max_input_images: maxInputs, needs_input_image: needsInputs } =
    served.model.images;
  const [title, hint] = WORDS[needsInputs ? "edits" : maxInputs > 0 ? "both" : "makes"];
  element("image-title").textContent = title;
  element("image-prompt").placeholder = hint;
  offerField("image-negative", parameters.includes("negative_prompt"));
  offerField("image-steps", parameters.includes("num_inference_steps"));
  offerField("image-previews", parameters.includes("partial_images"));
  element("image-editing").hidden = maxInputs === 0;
  offerSizes(sizes, free);
}

function offerField(id, isOffered) {
  element(id).disabled = !isOffered;
  element(id).closest("label, .field").hidden = !isOffered;
}

function offerSizes(sizes, free) {
  const select = element("image-size");
  const chosen = select.value;
  const options = [new Option("Automatic", "auto"), ...sizes.map((size) => new Option(size, size))];
  if (free) {
    options.push(new Option("Other size", OTHER_SIZE));
    const [width, height] = sizes[0].split("x");
    offerSide("image-width", width, free.multiple);
    offerSide("image-height", height, free.multiple);
    element("image-size-help").textContent =
      `Width and height are multiples of ${free.multiple}, up to ${free.max_ratio}:1, with at most ` +
      `${free.max_pixels.toLocaleString("en")} pixels in all.`;
  }
  select.replaceChildren(...options);
  if (options.some(({ value }) => value === chosen)) select.value = chosen;
  showSides();
}

function offerSide(id, first, multiple) {
  const input = element(id);
  input.min = input.step = multiple;
  input.value ||= first;
}

function showSides() {
  const isOther = element("image-size").value === OTHER_SIZE;
  offerField("image-width", isOther);
  offerField("image-height", isOther);
  element("image-size-help").hidden = !isOther;
}

element("image-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!element("image-start").disabled) make();
});
element("image-stop").addEventListener("click", () => abort?.abort());
element("image-download").addEventListener("click", () => download(file.blob, file.name));
element("image-prompt").addEventListener("input", updateButtons);
element("image-size").addEventListener("change", showSides);
element("image-previews").addEventListener("change", () =>
  settings.change({ previews: element("image-previews").checked }),
);
settings.watch(({ previews }) => (element("image-previews").checked = previews));
imageInputs.watch(updateButtons);
served.watch(offerWhatIsServed);
