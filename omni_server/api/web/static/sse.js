// Reads server-sent events from a fetch response. EventSource cannot send a POST request.

/**
 * The data of each event, as strings. Comments (the server's keep-alives) and other fields are skipped.
 * @param {ReadableStream<Uint8Array>} body
 */
export async function* readEvents(body) {
  let data = [];
  for await (const line of readLines(body)) {
    if (line === "") {
      if (data.length > 0) yield data.join("\n");
      data = [];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

async function* readLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield line.endsWith("\r") ? line.slice(0, -1) : line;
    }
  } finally {
    // Leaving early ends the request. A stream that has failed has said so already.
    await reader.cancel().catch(() => {});
  }
}
