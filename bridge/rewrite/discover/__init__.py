"""Finds the entry points of a rewriting by running a program's own tests."""
