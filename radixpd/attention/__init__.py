"""Paged attention: one seam (`base`), one file per backend."""
