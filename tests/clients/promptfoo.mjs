// promptfoo: one question over chat completions and over Responses.
import assert from "node:assert/strict";

Object.assign(process.env, {
  PROMPTFOO_DISABLE_TELEMETRY: "1",
  PROMPTFOO_DISABLE_UPDATE: "1",
  PROMPTFOO_DISABLE_REMOTE_GENERATION: "true",
  PROMPTFOO_CONFIG_DIR: new URL("home", import.meta.url).pathname,
});
const { default: promptfoo } = await import("promptfoo");

const [address, model] = process.argv.slice(2);
const config = { apiBaseUrl: `${address}/v1`, apiKey: "none", temperature: 0 };
const results = await promptfoo.evaluate(
  {
    prompts: ["What is {{sum}}?"],
    providers: [
      { id: `openai:chat:${model}`, config: { ...config, max_tokens: 100 } },
      { id: `openai:responses:${model}`, config: { ...config, max_output_tokens: 100 } },
    ],
    tests: [
      { vars: { sum: "27 plus 15" }, assert: [{ type: "contains", value: "is 42" }] },
      { vars: { sum: "31 plus 12" }, assert: [{ type: "contains", value: "is 43" }] },
    ],
    writeLatestResults: false,
  },
  { cache: false, showProgressBar: false },
);
const { stats } = await (results.toEvaluateSummary?.() ?? results);
assert.deepEqual([stats.successes, stats.failures, stats.errors], [4, 0, 0]);
process.exit(0); // its database stays open
