// OpenAI's JavaScript client: chats, the tool runner, responses, embeddings.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.BASE_URL + "/v1" });
const model = "fake";
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const City = z.object({ name: z.string(), people: z.number() });

await client.models.list();
await client.completions.create({ model, prompt: "Once", max_tokens: 8 });
for await (const _ of await client.chat.completions.create({ model, messages, stream: true }));
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({
    model,
    messages,
    stream,
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          description: "Tells it.",
          parameters,
          function: async ({ city }) => `Sunny in ${city}.`,
          parse: JSON.parse,
        },
      },
    ],
  });
  await runner.finalContent();
}
await client.chat.completions.parse({
  model,
  messages,
  response_format: zodResponseFormat(City, "city"),
});
const tools = [{ type: "function", name: "weather", parameters, strict: true }];
const response = await client.responses.create({ model, input: "Weather?", tools });
const call = response.output.find((item) => item.type === "function_call");
const input = [
  { role: "user", content: "Weather?" },
  ...response.output,
  { type: "function_call_output", call_id: call.call_id, output: "Sunny." },
];
await client.responses.stream({ model, input, tools, store: false }).finalResponse();
await client.responses.parse({
  model,
  input: "City?",
  text: { format: zodTextFormat(City, "city") },
});
await client.embeddings.create({ model, input: ["one", "two"] });
