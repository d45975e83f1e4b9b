"""Blocks that tokens may pass by: who should enter, who is made to, and what then runs."""

from unittest import mock

import pytest
import torch


@pytest.fixture
def make_mask():
    """Of 3 rows of 20 tokens, two of them padded on a side, the second to one token."""

    def make(kind: str) -> torch.Tensor | None:
        mask = torch.ones(3, 20, dtype=torch.long)
        if kind == "left":
            mask[0, :7], mask[1, :19] = 0, 0
        elif kind == "right":
            mask[0, 9:], mask[1, 1:] = 0, 0
        return None if kind == "none" else mask

    return make


@pytest.fixture
def who_enters():
    """Who enters a block and by what gate, [B, T] each, row by row as the definition has it."""

    def choose(block, x, mask):
        router = getattr(block, "depth_router", None)
        is_token = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        if router is None:
            return is_token, torch.ones_like(x[..., 0])
        x = x * (x.square().mean(dim=-1, keepdim=True) + router.eps).rsqrt()
        score = (x @ router.score.weight[0]) + router.score.bias
        enters = score > 0.0
        if router.predictor is not None and not block.training:
            enters = (x @ router.predictor.weight[0]) + router.predictor.bias > 0.0
        elif router.predictor is not None:
            enters = torch.zeros_like(is_token)
            for b in range(len(x)):
                at = is_token[b].nonzero().squeeze(1)
                room = max(1, round(router.capacity * len(at)))
                enters[b, at[score[b, at].argsort(descending=True)[:room]]] = True
        return enters & is_token, torch.sigmoid(score)

    return choose


@pytest.fixture
def force_entry():
    """Let these tokens enter, whatever they are."""

    def force(block, enters):
        forward = block.depth_router.forward

        def forced(x, is_token):
            entry = forward(torch.nan_to_num(x), is_token)
            return type(entry)(enters, entry.gate, entry.loss, None)

        return mock.patch.object(block.depth_router, "forward", forced)

    return force


@pytest.fixture
def assert_checkpointing_changes_nothing():
    """Gradients are the same, and the feed-forward of every block is computed twice."""

    def check(model, ids):
        def gradients():
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            return [p.grad.clone() for p in model.parameters()]

        plain = gradients()
        model.gradient_checkpointing_enable()
        calls = []
        for block in model.model.layers:
            block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        torch.testing.assert_close(gradients(), plain)
        assert len(calls) == 2 * len(model.model.layers), "nothing was computed twice"

    return check


class Spy:
    """How many tokens reached each part of a block, padding included."""

    def __init__(self, block):
        self.seen = {}
        parts = {
            "controller": block.attention.controller,
            "query": block.attention.projections[0].q_proj,
            "output": block.attention.projections[0].o_proj,
            "feed-forward": block.mlp,
        }
        for name, part in parts.items():
            part.register_forward_pre_hook(
                lambda _, args, name=name: self.count(name, args[0].shape)
            )

    def count(self, name, shape):
        self.seen[name] = self.seen.get(name, 0) + shape[0] * shape[1]


@pytest.fixture
def spy_on():
    return Spy
