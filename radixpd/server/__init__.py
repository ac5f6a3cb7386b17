"""The HTTP side: one admission function, native and OpenAI routes over one runtime client."""
