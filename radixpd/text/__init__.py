"""Text in and out: tokenizer files, chat templates, incremental detokenizing with stop strings. Never torch or transformers."""
