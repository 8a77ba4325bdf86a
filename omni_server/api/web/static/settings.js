// What the user has chosen. Kept in this browser, so that it survives a reload.

const ITEM = "omni-server.settings";

const isText = (value) => typeof value === "string" && value.length <= 20_000;
const isBoolean = (value) => typeof value === "boolean";
const isWithin = (least, most) => (value) => typeof value === "number" && value >= least && value <= most;
const orNull = (check) => (value) => value === null || check(value);
const isCount = (most) => (value) => Number.isInteger(value) && value >= 1 && value <= most;

/** By name: the value at first, and what values there may be. Null leaves the choice to the server. */
const FIELDS = {
  instructions: ["", isText],
  temperature: [null, orNull(isWithin(0, 2))],
  maxTokens: [null, orNull(isCount(4096))],
  voice: [null, orNull(isText)],
  speaks: [true, isBoolean],
  speed: [1, isWithin(0.25, 4)],
  format: ["wav", isText],
  writesDown: [true, isBoolean],
  previews: [true, isBoolean],
};

const FIRST = Object.fromEntries(Object.entries(FIELDS).map(([name, [first]]) => [name, first]));

const listeners = [];
let values = load();

export const settings = {
  get: () => values,

  /** Fields with a value that cannot be are left as they are. */
  change(changes) {
    values = { ...values, ...valid(changes) };
    try {
      localStorage.setItem(ITEM, JSON.stringify(values));
    } catch {
      // Storage is full or not allowed: they hold until the page is left.
    }
    for (const listener of listeners) listener(values);
  },

  reset() {
    settings.change(FIRST);
  },

  /** `listener` is called now and at each change. */
  watch(listener) {
    listeners.push(listener);
    listener(values);
  },
};

function load() {
  try {
    return { ...FIRST, ...valid(JSON.parse(localStorage.getItem(ITEM)) ?? {}) };
  } catch {
    return FIRST; // not written by this page, or not readable
  }
}

function valid(changes) {
  return Object.fromEntries(Object.entries(changes).filter(([name, value]) => FIELDS[name]?.[1](value)));
}
