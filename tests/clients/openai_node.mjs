// The official Node client: streams, tool loops by runTools, structured output and Responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [address, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const sum = { model, temperature: 0, messages: [{ role: "user", content: "What is 27 plus 15?" }] };
const SAID = "27 plus 15 is 42.";

const answer = await client.chat.completions.create(sum);
assert.equal(answer.choices[0].message.content, SAID);
const stream = client.chat.completions.stream({ ...sum, stream_options: { include_usage: true } });
const deltas = [];
stream.on("content", (delta) => deltas.push(delta));
const final = await stream.finalChatCompletion();
assert.equal(deltas.join(""), SAID);
assert.equal(final.choices[0].message.content, SAID);
assert.equal(final.usage.completion_tokens, answer.usage.completion_tokens);

const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const asked = [{ role: "user", content: "What is the weather in Rome?" }];
for (const isStreamed of [false, true]) {
  const cities = [];
  const getWeather = ({ city }) => {
    cities.push(city);
    return '{"weather": "sunny", "celsius": 21}';
  };
  const weather = { name: "get_weather", parameters, parse: JSON.parse, function: getWeather };
  const runner = client.chat.completions.runTools({
    model,
    temperature: 0,
    stream: isStreamed,
    messages: asked,
    tools: [{ type: "function", function: weather }],
  });
  assert.equal(await runner.finalContent(), "It is sunny in Rome and 21 degrees.");
  assert.deepEqual(cities, ["Rome"]);
  const reasons = (await runner.allChatCompletions()).map(({ choices }) => choices[0].finish_reason);
  assert.deepEqual(reasons, ["tool_calls", "stop"]);
}

const schema = {
  type: "object",
  properties: { sum: { type: "integer" }, is_odd: { type: "boolean" } },
  required: ["sum", "is_odd"],
  additionalProperties: false,
};
const response_format = { type: "json_schema", json_schema: { name: "sum", strict: true, schema } };
const { parsed } = (await client.chat.completions.parse({ ...sum, response_format })).choices[0].message;
assert.ok(Number.isInteger(parsed.sum) && typeof parsed.is_odd === "boolean");

const input = { model, temperature: 0, input: "What is 27 plus 15?" };
assert.equal((await client.responses.create(input)).output_text, SAID);
const events = client.responses.stream(input);
let text = "";
for await (const event of events) {
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert.equal(text, SAID);
assert.equal((await events.finalResponse()).output_text, SAID);
const tool = { type: "function", name: "get_weather", strict: true, parameters };
const called = await client.responses.create({ model, temperature: 0, input: asked, tools: [tool] });
const call = called.output.find((item) => item.type === "function_call");
assert.deepEqual(JSON.parse(call.arguments), { city: "Rome" });

await assert.rejects(client.models.retrieve("none"), OpenAI.NotFoundError);
await assert.rejects(
  client.chat.completions.create({ ...sum, temperature: 3 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
const stopped = await client.completions.create({ model, prompt: "Once", stream: true, max_tokens: 900 });
for await (const part of stopped) {
  assert.equal(part.object, "text_completion");
  break; // closes the connection in the middle of the stream
}
