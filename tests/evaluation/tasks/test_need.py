"""Precision and recall of full attention against need, by their definitions."""

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.evaluation.tasks import NOT_ASKED, TaskTally

B, T, V = 3, 20, 7


def batch(layers=((2, 3), (1, 2)), groups=None, seed=0):
    """Random answers, labels, need, and routing weights of layers of (groups, experts)."""
    torch.manual_seed(seed)
    predicted, labels = torch.randint(V, (B, T)), torch.randint(V, (B, T))
    labels[torch.rand(B, T) < 0.5] = NOT_ASKED
    labels[:, 0] = NOT_ASKED
    is_asked = labels.roll(-1, 1) != NOT_ASKED
    needs_full = is_asked & (torch.rand(B, T) < 0.5)
    weights = []
    for num_groups, num_experts in layers:
        shape = (B, T, num_experts) if num_groups == 1 else (B, T, num_groups, num_experts)
        weights.append(torch.rand(shape).softmax(-1))
    return predicted, labels, needs_full, weights


def test_figures_are_their_definitions():
    predicted, labels, needs_full, weights = batch()
    tally = TaskTally([torch.tensor([True, False, False]), torch.tensor([False, True])])
    tally.add(predicted, labels, needs_full, weights)
    tally.add(predicted, labels, needs_full, weights)
    result = tally.result()

    far, near, on_full, need = [], [], [[], [], []], []
    for b in range(B):
        for t in range(T):
            answer = labels[b, t + 1].item() if t + 1 < T else NOT_ASKED
            if answer != NOT_ASKED:
                (far if needs_full[b, t] else near).append(predicted[b, t].item() == answer)
            need.append(needs_full[b, t].item())
            first = any(weights[0][b, t, g].argmax() == 0 for g in range(2))
            second = weights[1][b, t].argmax().item() == 1
            for layer, value in zip(on_full, (first, second, first or second), strict=True):
                layer.append(value)

    assert result.num_tokens == 2 * B * T
    assert result.num_asked == 2 * (len(far) + len(near))
    assert result.accuracy == pytest.approx(sum(far + near) / len(far + near))
    assert result.far_accuracy == pytest.approx(sum(far) / len(far))
    assert result.near_accuracy == pytest.approx(sum(near) / len(near))
    assert result.need_share == pytest.approx(sum(need) / len(need))
    for figures, on in zip([*result.layers, result.any_layer], on_full, strict=True):
        hits = sum(a and b for a, b in zip(on, need, strict=True))
        assert figures.full_share == pytest.approx(sum(on) / len(on))
        assert figures.precision == pytest.approx(hits / sum(on))
        assert figures.recall == pytest.approx(hits / sum(need))
    shares = [layer.full_share for layer in result.layers]
    assert result.full_share == pytest.approx(sum(shares) / 2)
    assert result.to_dict()["any_layer"]["recall"] == result.any_layer.recall
    flat = result.flatten()
    assert flat["full_precision"] == result.any_layer.precision
    assert flat["layer_1/full_recall"] == result.layers[1].recall


def test_routes_that_follow_need_are_perfect():
    predicted, labels, needs_full, _ = batch()
    weights = torch.stack([needs_full, ~needs_full], dim=-1).float()
    tally = TaskTally([torch.tensor([True, False])] * 2)
    # one layer alone has them all, the other none
    tally.add(
        predicted, labels, needs_full, [weights, weights.flip(-1) * 0 + torch.tensor([0.0, 1.0])]
    )
    result = tally.result()
    assert (result.any_layer.precision, result.any_layer.recall) == (1.0, 1.0)
    assert result.any_layer.full_share == result.need_share
    assert result.full_share == result.need_share / 2
    assert (result.layers[1].precision, result.layers[1].recall) == (None, 0.0)
    assert "layer_1/full_precision" not in result.flatten()


def test_a_token_that_passed_the_block_by_is_not_on_full_attention():
    predicted, labels, needs_full, (weights,) = batch(layers=((1, 2),))
    tally = TaskTally([torch.tensor([True, True])])
    tally.add(predicted, labels, needs_full, [weights * needs_full.unsqueeze(-1)])
    result = tally.result()
    assert result.full_share == result.need_share > 0
    assert result.any_layer.precision == result.any_layer.recall == 1.0


def test_the_rows_of_a_batch_add_up():
    arguments = batch()
    tally = TaskTally([torch.tensor([True, False, False]), torch.tensor([False, True])])
    rows = tally.count(*arguments)
    tally.add(*arguments)
    torch.testing.assert_close(rows.double().sum(0), tally.sums)
    assert tally.result_of(rows.sum(0)) == tally.result()


def test_full_attention_is_known_by_what_it_sees():
    config = MetaAttentionConfig(
        vocab_size=V,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        window_size=4,
        layer_experts=[["local", "gated_full", "linear"], ["full"]],
        expert_costs="flops",
    )
    tally = TaskTally.of(MetaAttentionForCausalLM(config))
    assert [mask.tolist() for mask in tally.is_full] == [[False, True, False], [True]]
