"""Rows of an evaluation: they add up to its figures, however they were batched."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from meta_attention.evaluation.routing import RoutingTally
from meta_attention.evaluation.tasks import TaskTally
from meta_attention.training.evaluation_rows import EvaluationRows
from meta_attention.training.packing import IGNORED

B, T, V = 5, 6, 7


@pytest.fixture
def rows():
    routing = RoutingTally([("full", "local")], [torch.tensor([1.0, 0.2])])
    return EvaluationRows(routing, TaskTally([torch.tensor([True, False])]))


def test_rows_add_up_to_the_figures_of_all_tokens_however_they_are_batched(rows):
    torch.manual_seed(0)
    logits, labels = torch.randn(B, T, V), torch.randint(V, (B, T))
    # rows predict different numbers of tokens
    labels[torch.rand(B, T) < 0.4] = IGNORED
    needs_full = torch.rand(B, T) < 0.5
    weights = torch.rand(B, T, 2).softmax(dim=-1)

    def count(part):
        out = SimpleNamespace(
            logits=logits[part], routing_weights=[weights[part]], concentrations=[None]
        )
        return rows.count(out, labels[part], needs_full[part])

    whole, parts = count(slice(None)), [count(slice(0, 2)), count(slice(2, B))]
    torch.testing.assert_close(torch.cat(parts), whole)
    result = rows.add_up(whole.numpy())
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert result.task_loss == pytest.approx(expected.item(), rel=1e-5)
    cost = (weights @ torch.tensor([1.0, 0.2])).mean().item()
    assert result.routing.projected_cost == pytest.approx(cost, rel=1e-5)
    assert result.task.num_asked == (labels[:, 1:] != IGNORED).sum()
    figures = result.figures(kl_weight=0.5, cost_weight=0.1)
    assert figures["loss"] == pytest.approx(result.task_loss + 0.1 * cost, rel=1e-5)
