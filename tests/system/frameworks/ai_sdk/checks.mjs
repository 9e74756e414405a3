// Typed answers and forced calls through the AI SDK: `node checks.mjs http://127.0.0.1:PORT QUESTION`.
// Prints one line of JSON for each check: {"name", "problem"}; no problem is "".
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [root, prompt] = process.argv.slice(2);
const at = { baseURL: `${root}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ ...at, name: "vllm-mlx", supportsStructuredOutputs: true });
const openai = createOpenAI(at);
const models = {
  "openai-compatible": compatible("gpt-oss-20b"),
  "openai, chat": openai.chat("gpt-oss-20b"),
  "openai, responses": openai.responses("gpt-oss-20b"),
  anthropic: createAnthropic(at)("gpt-oss-20b"),
};

const place = z.object({ city: z.string(), country: z.enum(["UK", "IT", "DE"]) });
const person = z.object({
  name: z.string(),
  age: z.number().int().min(1).max(150),
  kind: z.enum(["human", "robot"]),
  tags: z.array(z.string()),
  home: place,
  nickname: z.string().nullable(),
  scores: z.partialRecord(z.enum(["wit", "luck"]), z.number()),
});
const tools = {
  move: tool({ description: "Moves somebody.", inputSchema: z.object({ who: z.string(), where: place }) }),
  introduce: tool({ description: "Introduces somebody.", inputSchema: person }),
};
const settings = { prompt, maxRetries: 0, maxOutputTokens: 2000 };

const checks = {
  generateObject: async (model) => {
    const { object } = await generateObject({ ...settings, model, schema: person });
    person.parse(object);
  },
  "generateText with an output": async (model) => {
    const { output } = await generateText({ ...settings, model, output: Output.object({ schema: person }) });
    person.parse(output);
  },
  "streamText with an output": async (model) => {
    const streamed = streamText({ ...settings, model, output: Output.object({ schema: person }) });
    person.parse(await streamed.output);
  },
  "toolChoice required": async (model) => {
    const { toolCalls } = await generateText({ ...settings, model, tools, toolChoice: "required" });
    called(toolCalls, Object.keys(tools));
  },
  "toolChoice of a tool": async (model) => {
    const toolChoice = { type: "tool", toolName: "introduce" };
    const { toolCalls } = await generateText({ ...settings, model, tools, toolChoice });
    called(toolCalls, ["introduce"]);
  },
};

function called(calls, names) {
  if (calls.length !== 1 || !names.includes(calls[0].toolName) || calls[0].invalid) {
    throw new Error(`called ${JSON.stringify(calls)}`);
  }
  tools[calls[0].toolName].inputSchema.parse(calls[0].input);
}

for (const [provider, model] of Object.entries(models)) {
  for (const [what, check] of Object.entries(checks)) {
    const problem = await check(model).then(() => "", (error) => `${error}`.slice(0, 500) || "unknown");
    console.log(JSON.stringify({ name: `${provider}: ${what}`, problem }));
  }
}
