// Vercel's AI SDK by its OpenAI-compatible provider, and by OpenAI's over chat and Responses.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [address, model] = process.argv.slice(2);
const server = { baseURL: `${address}/v1`, apiKey: "none" };
const options = { name: "aserve", includeUsage: true, supportsStructuredOutputs: true };
const compatible = createOpenAICompatible({ ...server, ...options });
const openai = createOpenAI(server);
const sum = { prompt: "What is 27 plus 15?", temperature: 0 };
const SAID = "27 plus 15 is 42.";

for (const each of [compatible(model), openai.chat(model), openai.responses(model)]) {
  const whole = await generateText({ model: each, ...sum });
  assert.equal(whole.text, SAID);
  assert.equal(whole.finishReason, "stop");
  const streamed = streamText({ model: each, ...sum });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.equal(text, SAID);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);

  const cities = [];
  const getWeather = tool({
    description: "Returns the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return { weather: "sunny", celsius: 21 };
    },
  });
  const weather = {
    model: each,
    tools: { get_weather: getWeather },
    stopWhen: stepCountIs(2),
    prompt: "What is the weather in Rome?",
    temperature: 0,
  };
  assert.match((await generateText(weather)).text, /21 degrees/);
  assert.match(await streamText(weather).text, /21 degrees/);
  assert.deepEqual(cities, ["Rome", "Rome"]);

  const schema = z.object({ sum: z.number().int(), is_odd: z.boolean() });
  const { output } = await generateText({ model: each, ...sum, output: Output.object({ schema }) });
  assert.equal(typeof output.is_odd, "boolean");
}
const { reasoningText } = await generateText({ model: compatible(model), ...sum });
assert.match(reasoningText, /7\+5=12/);
for (const each of [compatible.textEmbeddingModel(model), openai.embedding(model)]) {
  const { embeddings } = await embedMany({ model: each, values: ["one", "two"] });
  assert.deepEqual(embeddings.map((vector) => vector.length), [128, 128]);
}
