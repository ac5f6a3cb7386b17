"""One generic decoder, a table of families, and the readers that fill its weights."""
