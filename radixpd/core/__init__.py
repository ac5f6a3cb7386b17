"""The brain: integers and dataclasses only. No torch, no sockets, no clock, no randomness; time and seeds are arguments."""
