"""An inspection made by hand: three layers, one of them static, and text that must be escaped."""

import pytest
import torch

from meta_attention.evaluation.inspect import InspectedLayer, Inspection
from meta_attention.evaluation.routing import summarise_routing

TOKENS = ["The", " <b>", "&amp;", "</script>", "<script>alert(1)", '"\n', "{{title}}", "\u20ac'"]


@pytest.fixture
def inspection() -> Inspection:
    names = [("full", "linear", "local"), ("local",), ("full", "local")]
    costs = [[1.0, 0.15, 0.3], [0.3], [1.0, 0.3]]
    weights = [torch.randn(len(TOKENS), len(n)).mul(2.0).softmax(-1) for n in names]
    layers = []
    for name, cost, weight in zip(names, costs, weights, strict=True):
        signals = {"margin": torch.rand(len(TOKENS)).tolist()} if len(name) > 1 else {}
        layers.append(
            InspectedLayer(name, cost, weight.tolist(), weight.argmax(-1).tolist(), signals)
        )
    return Inspection(
        tokens=TOKENS,
        ids=list(range(len(TOKENS))),
        loss=[None, *torch.rand(len(TOKENS) - 1).tolist()],
        layers=layers,
        routing=summarise_routing(
            [w[None] for w in weights], [0.5, None, 0.2], names, [torch.tensor(c) for c in costs]
        ),
    )
