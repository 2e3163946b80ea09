"""Models in GGUF files: a folder in Hugging Face's format is made of what a file says of itself."""
