"""What a model's text consists of: reasoning, tool calls, and the text that is the answer."""
