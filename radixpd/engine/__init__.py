"""The model runner's side of a step: torch, KV pool, inputs, sampling."""
