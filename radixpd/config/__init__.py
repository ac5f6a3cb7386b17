"""Settings, the command line that fills them, and the pure step that resolves what was left open."""
