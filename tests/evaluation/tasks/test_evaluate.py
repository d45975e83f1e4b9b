"""A model on a task: every figure, and what can and cannot learn it."""

import json

import pytest
import torch
import torch.nn.functional as F

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.evaluation.forcing import RouteJudge, force_expert
from meta_attention.evaluation.tasks import RecallTask, TaskDataset, evaluate_task

TASK = RecallTask(
    window=3,
    reach=6,
    length=40,
    pairs=6,
    fewest_pairs=2,
    recalls=6,
    copies=6,
    copy_distance=3,
    keys=8,
    values=8,
    noise=4,
)
HELD_OUT = TaskDataset(TASK, 64, held_out=True)


def build_model(seed=0, **fields):
    torch.manual_seed(seed)
    return MetaAttentionForCausalLM(
        MetaAttentionConfig(
            vocab_size=len(TASK.words),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=TASK.length,
            window_size=TASK.window,
            **fields,
        )
    )


def learn(model, steps, batch_size=32):
    """Plain training, task loss only, until all is learnt or the steps are over."""
    dataset = TaskDataset(TASK, steps * batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 50)
        batch = dataset.batch(step * batch_size, batch_size)
        loss = model(batch["input_ids"], labels=batch["labels"]).task_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 0.02:
            break
    return evaluate_task(model, HELD_OUT, batch_size=32).result


def test_full_attention_learns_recall():
    # five seeds took 167 to 248 steps
    result = learn(build_model(layer_experts=[["local"], ["full"]]), 800)
    assert result.far_accuracy > 0.9
    assert result.near_accuracy > 0.9
    assert [layer.full_share for layer in result.layers] == [0.0, 1.0]


def test_local_attention_learns_copies_and_cannot_recall():
    result = learn(build_model(experts=["local"]), 300)
    assert result.near_accuracy > 0.9
    # as good as guessing among the values
    assert result.far_accuracy < 1.5 / TASK.values
    assert result.any_layer.full_share == 0.0


def test_figures_agree_with_the_model_run_by_hand():
    model = build_model(routing="hard", initializer_range=0.2)
    evaluation = evaluate_task(model, HELD_OUT, batch_size=20, forced=True)
    batch = HELD_OUT.batch(0, 64)
    with torch.no_grad():
        out = model.eval()(batch["input_ids"], labels=batch["labels"], output_routing=True)
    assert evaluation.loss == pytest.approx(out.task_loss.item(), rel=1e-4)
    answers, asked = batch["labels"][:, 1:], batch["labels"][:, 1:] != -100
    right = out.logits[:, :-1].argmax(-1) == answers
    assert evaluation.result.accuracy == pytest.approx(right[asked].float().mean().item())
    assert evaluation.result.need_share == pytest.approx(6 / 40)
    is_full = [weights.argmax(-1) == 0 for weights in out.routing_weights]
    assert evaluation.result.layers[0].full_share == pytest.approx(is_full[0].float().mean().item())
    shares = [layer.share["full"] for layer in evaluation.routing.layers]
    assert shares == pytest.approx([layer.full_share for layer in evaluation.result.layers])

    # regret: over the tokens asked, with each expert of a layer forced in turn
    losses = []
    for expert in range(3):
        with torch.no_grad(), force_expert(model, [1], expert):
            logits = model(batch["input_ids"]).logits[:, :-1]
        losses.append(F.cross_entropy(logits[asked], answers[asked], reduction="none"))
    chosen = F.cross_entropy(out.logits[:, :-1][asked], answers[asked], reduction="none")
    best = torch.stack(losses).min(dim=0).values
    regret = evaluation.forced.layers[1].regret
    assert regret == pytest.approx((chosen - best).mean().item(), rel=1e-3)

    figures = json.loads(json.dumps(evaluation.to_dict()))
    assert figures["layers"][1]["regret"] == pytest.approx(regret)
    assert {"accuracy", "far_accuracy", "full_share", "regret", "adaptivity"} <= set(figures)
    assert {"precision", "recall", "full_share", "share"} <= set(figures["layers"][0])


def test_progress_counts_every_pass():
    model, seen = build_model(), []
    evaluate_task(
        model, HELD_OUT, batch_size=32, forced=True, advance=lambda *counts: seen.append(counts)
    )
    total = 2 * (1 + RouteJudge(model).num_passes)
    assert seen == [(i + 1, total) for i in range(total)]
    assert model.training
