"""The pages `/chat` and `/status`."""
