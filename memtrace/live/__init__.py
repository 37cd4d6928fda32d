"""Watching a program that runs: what the recorder says over a socket, and what follows. No torch, no screens."""
