"""The calls of `bridge.Module`s that run in a thread, and each module's scope in them."""
