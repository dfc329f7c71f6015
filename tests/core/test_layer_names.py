"""Names say where blocks sit."""

from __future__ import annotations

import pytest

from atlas_cli.core.layer_names import LayerPosition, places


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("visual.transformer.resblocks.11.attn.in_proj_weight", "11", "attn.in_proj_weight"),
        ("transformer.resblocks.0.mlp.c_fc.bias", "0", "mlp.c_fc.bias"),
        ("visual.conv1.weight", "", "conv1.weight"),
        ("visual.layer1.0.downsample.0.weight", "layer1.0", "downsample.0.weight"),
        ("visual.attnpool.q_proj.weight", "", "attnpool.q_proj.weight"),
        ("text.transformer.resblocks.3.ln_1.weight", "3", "ln_1.weight"),
        ("visual.odd.7", "", "odd.7"),
    ],
)
def test_the_layer_and_the_kind_of_one_tower(name: str, layer: str, kind: str):
    assert places([name]) == {name: LayerPosition(layer, kind)}


def test_two_towers_are_kept_apart():
    names = ["visual.transformer.resblocks.3.ln_1.weight", "transformer.resblocks.3.ln_1.weight"]
    assert list(places(names).values()) == [
        LayerPosition("3", "ln_1.weight"),
        LayerPosition("3", "text.ln_1.weight"),
    ]
