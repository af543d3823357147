"""Where the modules of the Linen program are now."""

FROM_LINEN: dict[str, str] = {
    "blocks/Mlp_0/Dense_0": "blocks.mlp.up",
    "blocks/Mlp_0/Dense_1": "blocks.mlp.down",
}
