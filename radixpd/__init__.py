"""radixpd: an LLM serving engine that treats the KV cache as its core asset."""

__version__ = "0.1.0"
