"""Decides what each class becomes: slots, sizes as expressions, names, and what stays Linen."""
