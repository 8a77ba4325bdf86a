// The body of a request for an answer, as the settings want it.

import { settings } from "./settings.js";
import { voiceOf } from "./voices.js";

/** `messages` is a `Messages`. The answer streams: that is `startAnswer`'s doing. */
export function chatBody(model, messages) {
  const { instructions, temperature, maxTokens, speaks } = settings.get();
  const voice = speaks ? voiceOf(model) : null;
  return {
    model: model.id,
    messages: messages.list(instructions),
    ...(voice === null
      ? { modalities: ["text"] }
      : { modalities: ["text", "audio"], audio: { voice, format: "pcm16" } }),
    ...(temperature === null ? {} : { temperature }),
    ...(maxTokens === null ? {} : { max_completion_tokens: maxTokens }),
  };
}
