"""A model's folder: its shape, its weights' files, its defaults."""
