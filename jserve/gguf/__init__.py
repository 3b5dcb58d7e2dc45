"""GGUF files: header, config and tokenizer. Imports no jax."""
