"""The HTTP application: routes, OpenAI's protocol, metrics; written against `EngineClient`."""
