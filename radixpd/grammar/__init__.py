"""Grammars that constrain output: what clients ask for becomes EBNF at the door (pure files), matchers of it run beside the sampler."""
