// The images to edit.

import { attachmentItem, discard, isImage } from "./attachments.js";
import { element, show } from "./page.js";
import { served } from "./served.js";

const listeners = [];
/** Like those of attachments.js, with the `file` in place of a part. */
let inputs = [];

export const imageInputs = {
  /** In the order in which the model gets them. */
  files: () => inputs.map(({ file }) => file),

  /** Adds files, unless they are no images, or more than the model takes. */
  add(files) {
    const problem = problemOf(files);
    show("image-problem", problem);
    if (problem) return;
    // Not scaled down: the model should see what it changes.
    const added = files.map((file) => ({
      kind: "image",
      name: file.name,
      file,
      url: URL.createObjectURL(file),
    }));
    setInputs([...inputs, ...added]);
  },

  /** `listener` is called at each change. */
  watch: (listener) => listeners.push(listener),
};

/** Why these files are not added; "" if they are. */
function problemOf(files) {
  const most = served.model?.images?.max_input_images ?? 0;
  const other = files.find((file) => !isImage(file));
  if (other) return `“${other.name}” is not an image.`;
  return inputs.length + files.length > most ? `This model takes ${counted(most)} to edit.` : "";
}

function counted(most) {
  return ["no images", "one image"][most] ?? `up to ${most} images`;
}

function setInputs(changed) {
  inputs = changed;
  const items = inputs.map((input) =>
    attachmentItem(input, () => {
      discard(input);
      setInputs(inputs.filter((other) => other !== input));
      element("image-add").focus();
    }),
  );
  element("image-inputs").replaceChildren(...items);
  element("image-inputs").hidden = items.length === 0;
  for (const listener of listeners) listener();
}

element("image-add").addEventListener("click", () => element("image-files").click());
element("image-files").addEventListener("change", () => {
  imageInputs.add([...element("image-files").files]);
  element("image-files").value = "";
});
