"""Writes the new classes and files as text."""
