"""The recipe behind `jserve-mini`: generated text in, Hugging Face checkpoints out.

Owns everything from word lists to the model card. It must not know jserve: the recipe runs
on a machine that has only jax, flax, optax, tokenizers, safetensors and rich.
"""
