"""Reads source files: positions, names, what depends on a call, and text with parts replaced."""
