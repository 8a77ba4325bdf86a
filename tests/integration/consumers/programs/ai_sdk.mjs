// Runs the Vercel AI SDK with its default API, the Responses API, and prints what it got as JSON.
//
//     node ai_sdk.mjs URL MODEL
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const server = createOpenAI({ baseURL: `${url}/v1`, apiKey: "EMPTY" });
const prompt = "How is the weather?";
const weather = tool({
    description: "How the weather is.",
    inputSchema: z.object({ place: z.string() }),
    execute: async ({ place }) => `sunny in ${place}`,
});

async function answers(served) {
    const whole = await generateText({ model: served, prompt });
    const stream = streamText({ model: served, prompt });
    let streamed = "";
    for await (const piece of stream.textStream) streamed += piece;
    const called = await generateText({ model: served, prompt, tools: { weather }, stopWhen: stepCountIs(3) });
    const results = called.steps.flatMap((step) => step.toolResults.map((result) => result.output));
    return { whole: whole.text, streamed, called: called.text, results };
}

console.log(JSON.stringify({ responses: await answers(server(model)), chats: await answers(server.chat(model)) }));
