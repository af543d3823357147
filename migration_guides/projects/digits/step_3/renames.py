"""Rules from the paths of the Linen program to the present ones."""

FROM_LINEN: dict[str, str] = {
    "blocks": "blocks.*",
    "blocks/LayerNorm_0": "blocks.*.norm",
    "blocks/Mlp_0/Dense_0": "blocks.*.mlp.up",
    "blocks/Mlp_0/Dense_1": "blocks.*.mlp.down",
}
