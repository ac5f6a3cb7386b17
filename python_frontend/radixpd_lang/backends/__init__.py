"""Whoever can complete a prompt: `base` is the protocol; radixpd's own server, any OpenAI-compatible one, and a fake implement it."""
