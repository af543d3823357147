"""Where the modules of the Linen program are now."""

FROM_LINEN: dict[str, str] = {}
