// What every part of the page uses: its elements, and the ways to tell the user something.

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
