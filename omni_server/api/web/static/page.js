// What every part of the page uses: its elements, and the ways to tell the user something or to hand something over.

export const element = (id) => document.getElementById(id);

/** A copy of the element in the template called `name`. */
export function copyOf(name) {
  return element(`${name}-template`).content.firstElementChild.cloneNode(true);
}

/** Shows `message` in the paragraph `id`, which "" hides. */
export function show(id, message) {
  element(id).textContent = message;
  element(id).hidden = message === "";
}

/** Tells users of screen readers. */
export function announce(message) {
  element("announcer").textContent = message;
}

/** Hands `blob` to the user as a file. */
export function download(blob, name) {
  const link = Object.assign(document.createElement("a"), {
    href: URL.createObjectURL(blob),
    download: name,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const SAID_MS = 2000;

/** `button` copies what `text` returns at that time. */
export function copyButton(button, text) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    const isCopied = await copy(text());
    button.textContent = isCopied ? "Copied" : "Not copied";
    announce(isCopied ? "Copied" : "The browser does not let this page copy");
    setTimeout(() => (button.textContent = label), SAID_MS);
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyFromField(text); // a page over plain http has no clipboard
  }
}

function copyFromField(text) {
  const field = Object.assign(document.createElement("textarea"), {
    value: text,
    className: "visually-hidden",
  });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}
