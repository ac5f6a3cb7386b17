"""The parts of `radixpd.llm`: what a call asks for, and running it on the engine's loop."""
