"""Runs a Linen model without computing anything, and records what it makes and calls."""
