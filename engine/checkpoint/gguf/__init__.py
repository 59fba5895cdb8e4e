"""Models in GGUF files: what their headers say, as the files of a Hugging Face model folder."""
