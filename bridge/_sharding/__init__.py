"""Mesh axes: specs, eager sharding, Explicit axes, and models created in their shards."""
