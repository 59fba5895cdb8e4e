"""The engine replica's process: one engine, its open calls, and what Serve asks it."""
