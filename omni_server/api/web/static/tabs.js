// The tabs: one panel is seen. Which one is in the address, so that it survives a reload and can be linked
// to.

const tabs = [...document.querySelectorAll("[role=tab]")];
const listeners = [];

/** `listener` gets the name of each tab that is opened, beginning with the one that is open. */
export function watchTabs(listener) {
  listeners.push(listener);
  listener(openTab());
}

/** The name of the tab that is seen. */
export function openTab() {
  return nameOf(tabs.find((tab) => tab.ariaSelected === "true"));
}

/** `isOffered` says by name which tabs there are: those of what the model can do. */
export function offerTabs(isOffered) {
  for (const tab of tabs) tab.hidden = !isOffered[nameOf(tab)];
  selectFromAddress();
}

function nameOf(tab) {
  return tab.getAttribute("aria-controls");
}

function select(selected) {
  for (const tab of tabs) {
    tab.ariaSelected = String(tab === selected);
    tab.tabIndex = tab === selected ? 0 : -1;
    document.getElementById(nameOf(tab)).hidden = tab !== selected;
  }
  for (const listener of listeners) listener(nameOf(selected));
}

function selectFromAddress() {
  const seen = tabs.filter((tab) => !tab.hidden);
  select(seen.find((tab) => `#${nameOf(tab)}` === location.hash) ?? seen[0]);
}

for (const tab of tabs) {
  tab.addEventListener("click", () => {
    select(tab);
    history.replaceState(null, "", `#${nameOf(tab)}`);
  });
  tab.addEventListener("keydown", ({ key }) => {
    const seen = tabs.filter((tab) => !tab.hidden);
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const index = { Home: 0, End: seen.length - 1 }[key] ?? seen.indexOf(tab) + (steps[key] ?? NaN);
    const next = seen.at(index % seen.length);
    if (Number.isNaN(index)) return;
    next.focus();
    next.click();
  });
}
window.addEventListener("hashchange", selectFromAddress);
selectFromAddress();
