"""The engine's loop, and the process that runs it."""
