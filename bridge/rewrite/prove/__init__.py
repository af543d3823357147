"""Compares the new model with the Linen model, and finds the class at fault."""
