// The page's requests as programs: a command for a shell, and Python with the official client.
// Each works as it stands; where the server wants a key, it is read from the environment.

import { apiKey } from "./api.js";

const SAVE_ANSWER =
  "import base64, json, sys; a = json.load(sys.stdin)['choices'][0]['message']['audio']; " +
  "open('answer.wav', 'wb').write(base64.b64decode(a['data'])); print('answer.wav:', a['transcript'])";
const PRINT_ANSWER = "import json, sys; print(json.load(sys.stdin)['choices'][0]['message']['content'])";

/** `body` is one of `chatBody`. */
export function chatAsCurl(body) {
  const program = body.audio ? SAVE_ANSWER : PRINT_ANSWER;
  return curl("chat/completions", asFile(body), "", ` | python3 -c "${program}"`);
}

export function chatAsPython(body) {
  const call = `answer = client.chat.completions.create(\n${pythonArguments(asFile(body))})\n`;
  const save = [
    "message = answer.choices[0].message",
    "print(message.audio.transcript)",
    'with open("answer.wav", "wb") as file:',
    "    file.write(base64.b64decode(message.audio.data))",
  ].join("\n");
  return body.audio
    ? python(["base64"], `${call}${save}`)
    : python([], `${call}print(answer.choices[0].message.content)`);
}

/** `body` is one of `readAloud`. */
export function speechAsCurl(body) {
  return curl("audio/speech", body, ` -o ${fileOf(body)}`);
}

export function speechAsPython(body) {
  const call = `client.audio.speech.with_streaming_response.create(\n${pythonArguments(body)}) as response:`;
  return python([], `with ${call}\n    response.stream_to_file(${pythonLiteral(fileOf(body))})`);
}

/** The file's name for an answer to `body`. */
export function fileOf({ response_format: format }) {
  return `speech.${format}`;
}

/** What is played while it comes is worth more in a file as a whole. */
function asFile(body) {
  return body.audio ? { ...body, audio: { ...body.audio, format: "wav" } } : body;
}

/**
 * The body goes through a here-document: nothing in it needs quoting, and it may be longer than a command
 * line. `options` are more of them, `pipe` is what takes the answer.
 */
function curl(path, body, options, pipe = "") {
  const key = apiKey.get() ? ' \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"' : "";
  return (
    `curl -sS ${shellQuoted(`${address()}/${path}`)} -H 'Content-Type: application/json'${key} \\\n` +
    `  --data-binary @-${options} <<'JSON'${pipe}\n${JSON.stringify(body, null, 2)}\nJSON\n`
  );
}

function python(modules, program) {
  const names = apiKey.get() ? [...modules, "os"] : modules;
  const imports = names.map((name) => `import ${name}\n`).join("");
  const key = apiKey.get() ? 'os.environ["OPENAI_API_KEY"]' : '"EMPTY"';
  return (
    `${imports}${imports && "\n"}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url=${pythonLiteral(address())}, api_key=${key})\n${program}\n`
  );
}

function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function address() {
  return new URL("v1", document.baseURI).href;
}

/** `value` indented by `indent` spaces from its second line on. */
function pythonLiteral(value, indent = 0) {
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
function pythonArguments(body) {
  return Object.entries(body)
    .map(([name, value]) => `    ${name}=${pythonLiteral(value, 4)},\n`)
    .join("");
}
