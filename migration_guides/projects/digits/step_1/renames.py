"""Rules from the paths of the Linen program to the present ones."""

FROM_LINEN: dict[str, str] = {}
