// The dialog with the links. The description of the API is not on every server open to everybody.

import { element } from "./page.js";

element("help-button").addEventListener("click", async () => {
  element("help-dialog").showModal();
  if (!element("docs-link").href) return;
  const response = await fetch(element("docs-link").href, { method: "HEAD" }).catch(() => null);
  if (response?.ok) return;
  element("docs-link").removeAttribute("href");
  element("docs-help").textContent = "This server does not show it to browsers";
  element("openapi-link").parentElement.hidden = true;
});
