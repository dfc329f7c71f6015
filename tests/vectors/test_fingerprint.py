"""A fingerprint depends on names, shapes and values, and on nothing else."""

from __future__ import annotations

import torch

from atlas_cli.vectors.format import digest, fingerprint

VALUES = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


def of(values: dict[str, torch.Tensor], scope: str = "visual") -> str:
    return fingerprint(scope, {name: digest(name, tensor) for name, tensor in values.items()})


def test_order_dtype_and_layout_do_not_matter():
    assert of(VALUES) == of(dict(reversed(VALUES.items())))
    assert of(VALUES) == of({name: tensor.double() for name, tensor in VALUES.items()})
    assert of(VALUES) == of({name: tensor.half() for name, tensor in VALUES.items()})
    assert of(VALUES) == of(VALUES | {"a": VALUES["a"].T.contiguous().T})


def test_every_value_name_shape_and_the_scope_matter():
    others = [
        VALUES | {"b": torch.tensor([1.0, 1.0, 1.0, 1.0000001])},
        VALUES | {"a": VALUES["a"].reshape(3, 2)},
        VALUES | {"a": VALUES["a"].flip(0)},
        {"a": VALUES["a"], "c": VALUES["b"]},
        {"a": VALUES["a"]},
        VALUES | {"c": torch.zeros(1)},
    ]
    found = {of(VALUES), of(VALUES, "all"), *(of(other) for other in others)}
    assert len(found) == len(others) + 2
