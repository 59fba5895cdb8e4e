// Vercel's AI SDK: text with tools in several steps, streams and objects, by three providers.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.BASE_URL + "/v1";
const compatible = createOpenAICompatible({
  name: "manta",
  baseURL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL });
const models = [
  compatible("fake"),
  openai.chat("fake"),
  openai.responses("fake"),
  createAnthropic({ baseURL })("fake"),
];
const tools = {
  weather: tool({
    description: "Tells it.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => ({ text: `Sunny in ${city}.` }),
  }),
};
const prompt = "What is the weather in Paris?";
const stopWhen = stepCountIs(3);

for (const model of models) {
  const { steps } = await generateText({ model, prompt, tools, stopWhen, system: "Be brief." });
  if (steps.length !== 2) throw new Error(`${steps.length} steps of ${model.provider}`);
  const stream = streamText({
    model,
    prompt,
    tools,
    stopWhen,
    onError: ({ error }) => {
      throw error;
    },
  });
  await stream.consumeStream();
  if ((await stream.steps).length !== 2) throw new Error(`stream of ${model.provider}`);
  const schema = z.object({ name: z.string(), people: z.number() });
  await generateObject({ model, prompt: "A city?", schema });
}
await embedMany({ model: compatible.textEmbeddingModel("fake"), values: ["one", "two"] });
