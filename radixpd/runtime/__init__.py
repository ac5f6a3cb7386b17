"""Processes and the links between them."""
