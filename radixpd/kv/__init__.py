"""KV memory: its layout and its pools."""
