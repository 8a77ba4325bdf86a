// Buttons that copy something, and say that they have.

import { announce } from "./page.js";

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
