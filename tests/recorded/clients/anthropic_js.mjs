// Anthropic's JavaScript client: messages, its tool runner, token counts, models.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.env.BASE_URL });
const model = "fake";
const max_tokens = 500;
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [
  {
    name: "weather",
    description: "Tells it.",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];

await client.models.list();
await client.messages.countTokens({ model, messages, tools });
const reply = await client.messages.create({ model, max_tokens, messages, tools });
const call = reply.content.find((block) => block.type === "tool_use");
const history = [
  ...messages,
  { role: "assistant", content: reply.content },
  { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "Sunny." }] },
];
await client.messages
  .stream({ model, max_tokens, messages: history, tools, thinking: { type: "adaptive" } })
  .finalMessage();
for (const stream of [false, true]) {
  const runner = client.beta.messages.toolRunner({
    model,
    max_tokens,
    messages,
    stream,
    tools: [
      betaZodTool({
        name: "weather",
        description: "Tells it.",
        inputSchema: z.object({ city: z.string() }),
        run: async ({ city }) => `Sunny in ${city}.`,
      }),
    ],
  });
  await runner.runUntilDone();
}
