"""Streams and keys of both styles."""
