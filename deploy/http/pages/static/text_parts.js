// Text that a model wrote, cut where its Markdown has code: [{ kind, text }] with the kinds "text",
// "code" (in one line) and "block". What isn't closed yet is a block after three backticks, else text.
export function textParts(text) {
  const parts = [];
  const add = (kind, piece) => piece && parts.push({ kind, text: piece });
  const block = /^[ \t]*```[^\n`]*\n(?<block>[\s\S]*?)(?:(?<=\n)[ \t]*```[ \t]*(?:\n|$)|$(?![\s\S]))/;
  const code = /(?<!`)(?<ticks>`+)(?!`)(?<code>[^\n]*?[^`\n])\k<ticks>(?!`)/;
  const pattern = new RegExp(`${block.source}|${code.source}`, "gm");
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    add("text", text.slice(end, match.index));
    add("block", match.groups.block?.replace(/\n$/, ""));
    add("code", match.groups.code);
    end = match.index + match[0].length;
  }
  add("text", text.slice(end));
  return parts;
}
