// JSON values as Python writes them.

/** `value` indented by `indent` spaces from its second line on. */
export function pythonLiteral(value, indent = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  // Every escape of JSON means the same in Python.
  if (typeof value !== "object") return JSON.stringify(value);
  const entries = Array.isArray(value)
    ? value.map((item) => pythonLiteral(item, indent + 4))
    : Object.entries(value).map(
        ([key, item]) => `${JSON.stringify(key)}: ${pythonLiteral(item, indent + 4)}`,
      );
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  if (entries.length === 0) return open + close;
  const line = `${open}${entries.join(", ")}${close}`;
  if (line.length < 72 && !line.includes("\n")) return line;
  const pad = " ".repeat(indent);
  return `${open}\n${entries.map((entry) => `${pad}    ${entry},\n`).join("")}${pad}${close}`;
}

/** The fields of `body` as the lines of a call's arguments. */
export function pythonArguments(body) {
  return Object.entries(body)
    .map(([name, value]) => `    ${name}=${pythonLiteral(value, 4)},\n`)
    .join("");
}
