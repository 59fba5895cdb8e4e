"""OpenAI's HTTP protocol over an `EngineClient`."""
