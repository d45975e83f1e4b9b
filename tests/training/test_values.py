"""Values are learnt for a model that stays as it is, and a price is found for any cost."""

from typing import Any

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.errors import ConfigError, DataError
from meta_attention.layers import attention
from meta_attention.training import values as values_module
from meta_attention.training.values import (
    EXPLORED_IN_USE,
    cost_range,
    find_price,
    is_of_router,
    knows_values,
    learn_on,
    learn_values,
    router_parameters,
    value_controllers,
    with_values,
)

T = 32


def make_static(**options) -> MetaAttentionForCausalLM:
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "window_size": 2,
        "max_position_embeddings": 64,
        "layer_experts": [["local"], ["full"], ["full"]],
        "initializer_range": 0.2,
    }
    return MetaAttentionForCausalLM(MetaAttentionConfig(**fields | options)).eval()


def make_batches(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(40, (2, T), generator=generator) for _ in range(number)]


@pytest.fixture
def routed() -> MetaAttentionForCausalLM:
    return with_values(make_static(), window_size=4, length=T)


def test_a_model_with_values_says_what_it_said(routed):
    static, (ids,) = make_static(), make_batches(1)
    assert torch.equal(static(ids).logits, routed(ids).logits)
    assert routed.config.experts_of(0) == ("local",)
    assert routed.config.experts_of(1) == ("full", "local:4")


def test_nothing_but_the_router_learns(routed):
    before = {name: p.clone() for name, p in routed.named_parameters()}
    rows = []
    learn_values(
        routed, make_batches(3), num_steps=3, on_step=lambda step, row: rows.append((step, row))
    )
    changed = {name for name, p in routed.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(is_of_router(name) for name in changed)
    assert [step for step, _ in rows] == [1, 2, 3]
    # all as before, but for what was learnt
    assert not routed.training
    assert all(p.requires_grad for p in routed.parameters())
    assert routed.config.training_weights == "mean"
    assert routed.model.layers[1].attention.controller.price.item() == routed.config.price == 0.0


def test_a_run_that_fails_leaves_the_model_as_it_was(routed):
    with pytest.raises(DataError, match="a batch for each of 5 steps, got 2"):
        learn_values(routed, make_batches(2), num_steps=5)
    assert not routed.training
    assert routed.config.training_weights == "mean"
    assert all(p.requires_grad for p in routed.parameters())


@pytest.mark.parametrize(("target", "share"), [(None, None), (0.5, None), (0.5, 0.3)])
def test_values_are_learnt_beside_the_dearest_experts_or_beside_routes_of_a_cost(
    routed, target, share, monkeypatch
):
    learn_values(routed, make_batches(20), num_steps=20)
    texts, seen = make_batches(8), []
    choose = attention.choose_routes

    def spy(*args, **kwargs):
        routes = choose(*args, **kwargs)
        if routes.weights.shape[-1] > 1 and routes.explored is not None:
            seen.append(routes)
        return routes

    monkeypatch.setattr(attention, "choose_routes", spy)
    options = {"texts": texts, "target_cost": target, "explored_share": share}
    learn_values(routed, make_batches(8), num_steps=8, lr=1e-6, **options)
    assert len(seen) == 16  # of two layers in eight steps
    takes_full = torch.cat([(routes.expert == 0)[~routes.explored] for routes in seen])
    costs = routed.model.layers[1].attention.controller.costs
    cost = torch.where(takes_full, costs[0], costs[1]).mean().item()
    assert cost == pytest.approx(1.0 if target is None else target, abs=0.03)
    # many try something, or few, where they would change what the others are used beside
    expected = share or (0.5 if target is None else EXPLORED_IN_USE)
    explored = torch.cat([routes.explored.flatten() for routes in seen]).float().mean().item()
    assert explored == pytest.approx(expected, abs=0.05)
    assert routed.config.explored_share == 0.5
    # and of those that try, any
    tries_full = torch.cat([(routes.expert == 0)[routes.explored] for routes in seen])
    assert tries_full.float().mean().item() == pytest.approx(0.5, abs=0.1)
    # afterwards the price is one that is known, and holds
    prices = [controller.price.item() for controller in value_controllers(routed)]
    assert prices == pytest.approx(2 * [routed.config.price])


def test_a_cost_is_checked_before_anything_is_learnt(routed):
    batches = make_batches(2)
    learn_values(routed, batches, num_steps=2)
    price = find_price(routed, batches, 0.7)
    before = {name: weight.clone() for name, weight in routed.state_dict().items()}
    with pytest.raises(ConfigError, match="texts must have tokens to find a price on"):
        learn_values(routed, batches, num_steps=2, target_cost=0.5)
    with pytest.raises(ConfigError, match="target_cost must be above"):
        learn_values(routed, batches, num_steps=2, texts=batches, target_cost=0.01)
    for name, weight in routed.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert routed.config.price == price
    prices = [controller.price.item() for controller in value_controllers(routed)]
    assert prices == pytest.approx(2 * [price])


def test_beside_routes_of_a_cost_something_must_be_known(routed, tmp_path):
    batches = make_batches(2)
    routed.save_pretrained(tmp_path)
    for unlearnt in (routed, MetaAttentionForCausalLM.from_pretrained(tmp_path)):
        assert not knows_values(unlearnt)
        with pytest.raises(ConfigError, match="let them learn beside the dearest experts first"):
            learn_values(unlearnt, batches, num_steps=1, texts=batches, target_cost=0.5)
    learn_values(routed, batches, num_steps=1)
    routed.save_pretrained(tmp_path)
    for learnt in (routed, MetaAttentionForCausalLM.from_pretrained(tmp_path)):
        assert knows_values(learnt)
        learn_values(learnt, batches, num_steps=1, texts=batches, target_cost=0.5)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_price_is_found_again_and_again_in_the_precision_of_the_steps(
    routed, monkeypatch, autocast
):
    learn_values(routed, make_batches(5), num_steps=5)
    found, known = [], []

    def spy(*args, **options):
        is_on = torch.is_autocast_enabled("cpu")
        assert is_on == (autocast is not None)
        assert not is_on or torch.get_autocast_dtype("cpu") == autocast
        found.append(find_price(*args, **options))
        return found[-1]

    def keep(step, figures):
        known.append(len(found))
        assert routed.config.price == found[-1]

    monkeypatch.setattr(values_module, "REPRICED_EVERY", 2)
    monkeypatch.setattr(values_module, "find_price", spy)
    texts, steps = make_batches(2), make_batches(5)
    options = {"num_steps": 5, "autocast": autocast, "on_step": keep}
    learn_values(routed, steps, texts=texts, target_cost=0.5, lr=0.05, **options)
    assert known == [1, 1, 2, 2, 3]
    assert len(set(found)) == 3
    found.clear()
    known.clear()
    learn_on(routed, steps, texts, 0.5, **options)
    assert known == [1, 1, 2, 2, 3]


def test_no_more_batches_are_taken_than_there_are_steps(routed):
    batches = iter(make_batches(6))
    learn_values(routed, batches, num_steps=2)
    learn_on(routed, batches, make_batches(1), 0.6, num_steps=2)
    left = [*batches]
    assert torch.equal(torch.stack(left), torch.stack(make_batches(6)[4:]))


def test_a_run_that_fails_beside_routes_of_a_cost_leaves_the_price(routed):
    learn_values(routed, make_batches(5), num_steps=5)
    find_price(routed, make_batches(2), 0.7)
    price = routed.config.price
    assert price > 0.0
    with pytest.raises(DataError, match="a batch for each of 5 steps, got 2"):
        learn_values(
            routed, make_batches(2), num_steps=5, texts=make_batches(2), target_cost=0.4, lr=0.05
        )
    assert routed.config.price == price
    prices = [controller.price.item() for controller in value_controllers(routed)]
    assert prices == pytest.approx(2 * [price])
    assert routed.config.training_weights == "mean"


def test_a_price_is_found_for_a_cost_and_saved(routed, tmp_path):
    learn_values(routed, make_batches(20), num_steps=20)
    texts, costs, prices = make_batches(4), [], []
    for target in (0.4, 0.6, 0.8):
        prices.append(find_price(routed, texts, target))
        outs = [routed(ids, use_cache=False, output_routed_cost=True) for ids in texts]
        costs.append(torch.stack([out.routed_cost for out in outs]).mean().item())
        assert costs[-1] <= target + 1e-6
    assert costs == sorted(costs)
    assert prices == sorted(prices, reverse=True)
    # as close as routes of single tokens allow
    assert costs[0] > 0.35
    routed.set_price(prices[0])
    routed.save_pretrained(tmp_path)
    loaded = MetaAttentionForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.price == prices[0]
    assert torch.equal(loaded(texts[0]).logits, routed(texts[0]).logits)


def test_values_learn_where_full_attention_is_worth_it():
    # the layer below can copy what stands far back only with full attention: a model that is
    # taught nothing else than to repeat the first half of a text
    torch.manual_seed(0)
    static = make_static(
        num_hidden_layers=2,
        layer_experts=[["local"], ["full"]],
        short_conv=3,
        initializer_range=0.1,
    ).train()

    def repeated(number: int) -> torch.Tensor:
        half = torch.randint(40, (number, T // 2))
        return torch.cat([half, half], dim=1)

    optimiser = torch.optim.AdamW(static.parameters(), 5e-3)
    for _ in range(300):
        ids = repeated(16)
        optimiser.zero_grad()
        static(ids, labels=ids).loss.backward()
        optimiser.step()
    routed = with_values(static.eval(), window_size=4, length=T, recurrence=2)
    learn_values(routed, (repeated(16) for _ in range(100)), num_steps=100, lr=1e-2)
    texts = [repeated(16) for _ in range(4)]
    find_price(routed, texts, 0.75)
    with torch.no_grad():
        out = routed(texts[0], output_routing=True)
        loss = routed(texts[0], labels=texts[0]).task_loss
        full = static(texts[0], labels=texts[0]).task_loss
    takes_full = out.routing_weights[1][..., 0].mean(dim=-1)  # [B, T], share of heads
    new, again = takes_full[:, 5 : T // 2].mean(), takes_full[:, T // 2 + 1 :].mean()
    assert again > new + 0.3
    # a window for all would lose what was learnt
    routed.set_price(10.0)
    with torch.no_grad():
        narrow = routed(texts[0], labels=texts[0]).task_loss
    assert narrow > full + 0.3
    assert loss - full < 0.2 * (narrow - full)


def test_values_weigh_as_their_part_of_the_loss(routed):
    # two layers of two heads: what is learnt is nats of a token, however many routes share it
    ids = make_batches(1)[0]
    values = []
    for layer in routed.model.layers[1:]:
        layer.attention.controller.register_forward_hook(
            lambda module, inputs, out: (out.score.retain_grad(), values.append(out))[0]
        )
    routed.config.training_weights = "explore"
    routed.train()(ids, labels=ids, use_cache=False).kl.backward()
    assert len(values) == 2
    for out in values:
        assert out.num_shares == 4
        grad = out.score.grad * ids.numel() * out.num_shares
        explored = grad.abs().sum(dim=-1, keepdim=True) > 0
        assert explored.float().mean().item() == pytest.approx(0.5, abs=0.1)
        assert explored.any()
        torch.testing.assert_close(grad, out.value.detach() * explored)
        lesson = out.lesson_of(torch.zeros_like(explored[..., 0], dtype=torch.long))
        weighed = torch.autograd.grad(lesson[..., 1].sum(), out.score)[0]
        torch.testing.assert_close(weighed[..., 1], torch.full_like(weighed[..., 1], 1 / 4))


def test_what_a_layer_has_yet_to_learn_teaches_earlier_layers_nothing(routed):
    """It did once: values of three layers drove each other up without end."""
    (ids,) = make_batches(1)
    routed.config.training_weights = "explore"
    routed.set_price(-1e9)  # all that do not explore take full attention
    first, last = (layer.attention.controller for layer in routed.model.layers[1:])

    def lesson():
        torch.manual_seed(0)
        out = routed.train()(ids, labels=ids, use_cache=False)
        (out.task_loss + out.kl).backward()
        grads = [p.grad.clone() for p in first.parameters()]
        routed.zero_grad()
        return grads, out.kl.item()

    (before, kl), weight = lesson(), last.mlp[-1].weight
    with torch.no_grad():
        weight.copy_(torch.randn_like(weight))
    after, other_kl = lesson()
    assert other_kl > 2.0 * kl
    assert any(grad.abs().max() > 0.0 for grad in before)
    for ours, expected in zip(after, before, strict=True):
        assert torch.equal(ours, expected)


def test_a_model_that_does_not_explore_teaches_its_router_nothing(routed):
    ids = make_batches(1)[0]
    routed.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is None for p in router_parameters(routed))
    assert routed.get_input_embeddings().weight.grad is not None


def test_a_price_that_cannot_be_found_leaves_the_old_one(routed):
    routed.set_price(0.25)
    routed.model.layers[1].attention.controller.mlp[-1].bias.data.fill_(float("nan"))
    routed.model.layers[2].attention.controller.mlp[-1].bias.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="no price up to"):
        find_price(routed, make_batches(1), 0.5)
    assert routed.config.price == 0.25


def test_what_passes_a_block_by_costs_nothing_there():
    static = make_static(layer_experts=[["full"]] * 3, depth_capacity=0.5, depth_layers=(0, 1, 2))
    lowest, highest = cost_range(with_values(static, window_size=4, length=T))
    assert highest == pytest.approx(0.5)
    assert 0.0 < lowest < 0.25


def test_generation_goes_on_as_it_did():
    static = make_static()
    static.generation_config.temperature = 0.3
    assert with_values(static, window_size=4, length=T).generation_config.temperature == 0.3


@pytest.mark.parametrize("routing", ["threshold", "top_k"])
def test_who_enters_a_block_teaches_routers_nothing(routing, monkeypatch):
    """Else the share that enters would count as nats that an expert before the block gains."""
    static = make_static(
        layer_experts=[["full"], ["local"], ["local"]],
        depth_capacity=0.5,
        depth_layers=(1,),
        depth_routing=routing,
    )

    def learnt(weight):
        routed = with_values(static, window_size=4, length=T)
        routed.config.depth_weight = weight
        torch.manual_seed(0)
        learn_values(routed, make_batches(2), num_steps=2)
        return router_parameters(routed)

    for ours, expected in zip(learnt(100.0), learnt(0.0), strict=True):
        assert torch.equal(ours, expected)
    # the model does learn it
    routed = with_values(static, window_size=4, length=T)
    routed.config.depth_weight = 100.0
    name = "score" if routing == "threshold" else "predictor"
    router = getattr(routed.model.layers[1].depth_router, name)
    before = [p.clone() for p in router.parameters()]
    learn_on(routed, make_batches(1), make_batches(1), 0.45, num_steps=1)
    assert all(not torch.equal(p, b) for p, b in zip(router.parameters(), before, strict=True))


def test_what_cannot_learn_is_refused(routed):
    batches = make_batches(1)
    with pytest.raises(ConfigError, match=r"must be of float32 to learn, got torch.bfloat16"):
        learn_on(routed.bfloat16(), batches, batches, 0.6, num_steps=1)
    routed.requires_grad_(False)
    with pytest.raises(ConfigError, match="routers must learn, but all of them are frozen"):
        learn_values(routed, batches, num_steps=1)


def test_errors_say_what_to_do(routed):
    with pytest.raises(ConfigError, match="below the length of a text, 32, got 32"):
        with_values(make_static(), window_size=T, length=T)
    for price in (True, "0.1", float("nan"), torch.tensor(0.1)):
        with pytest.raises(ConfigError, match="price must be a finite number"):
            routed.set_price(price)
    with pytest.raises(ConfigError, match="shared_projections=True"):
        with_values(make_static(shared_projections=False), window_size=4, length=T)
    with pytest.raises(ConfigError, match="lr must be above 0"):
        learn_values(routed, make_batches(1), num_steps=1, lr=0.0)
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="explored_share must be above 0 and at most 1"):
            learn_values(routed, make_batches(1), num_steps=1, explored_share=share)
    with pytest.raises(ConfigError, match="a model whose layers are static, some of them full"):
        with_values(routed, window_size=4, length=T)
    with pytest.raises(ConfigError, match="a model whose layers are static, some of them full"):
        with_values(make_static(layer_experts=[["local"]] * 3), window_size=4, length=T)
    with pytest.raises(ConfigError, match=r"target_cost must be above 0\.\d+"):
        find_price(routed, make_batches(1), 0.01)
    with pytest.raises(ConfigError, match="num_steps must be >= 1"):
        learn_values(routed, make_batches(1), num_steps=0)
    for call in (lambda m: learn_values(m, [], num_steps=1), router_parameters):
        with pytest.raises(ConfigError, match="this one has none"):
            call(make_static())
    with pytest.raises(ConfigError, match="a price is for controller='value'"):
        make_static().set_price(0.1)
    with pytest.raises(ConfigError, match="price must be a finite number"):
        routed.set_price(float("nan"))


def test_a_model_learns_on_with_its_routes_at_a_price_that_keeps_their_cost(routed, monkeypatch):
    monkeypatch.setattr("meta_attention.training.values.REPRICED_EVERY", 10)
    batches = make_batches(2)
    learn_values(routed, batches * 5, num_steps=10)
    find_price(routed, batches, 0.6)
    before = {name: p.clone() for name, p in routed.named_parameters()}
    rows, prices = [], []

    def keep(step, figures):
        rows.append(figures)
        prices.append(routed.config.price)

    # which it does not do while the model learns
    routed.config.training_weights = "explore"
    learn_on(routed, batches * 20, batches, 0.6, num_steps=40, lr=1e-2, on_step=keep)
    assert routed.config.training_weights == "explore"
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert all(row["kl"] == 0.0 for row in rows)
    for name, parameter in routed.named_parameters():
        assert torch.equal(parameter, before[name]) == is_of_router(name), name
        assert parameter.grad is None
    assert len(set(prices)) > 1
    assert len(set(prices[:10])) == 1
    assert not routed.training
    find_price(routed, batches, 0.6)
    with torch.no_grad():
        outs = [routed(ids, use_cache=False, output_routed_cost=True) for ids in batches]
    assert torch.stack([out.routed_cost for out in outs]).mean().item() <= 0.6


def test_learning_on_needs_values_a_cost_and_text(routed):
    batches = make_batches(1)
    with pytest.raises(ConfigError, match="this one has none"):
        learn_on(make_static(), batches, batches, 0.6, num_steps=1)
    with pytest.raises(ConfigError, match="target_cost must be above"):
        learn_on(routed, batches, batches, 0.01, num_steps=1)
    with pytest.raises(ConfigError, match="batches must have tokens"):
        find_price(routed, [], 0.6)
    with pytest.raises(ConfigError, match="lr must be above 0"):
        learn_on(routed, batches, batches, 0.6, num_steps=1, lr=0.0)
    with pytest.raises(DataError, match="a batch for each of 2 steps, got 1"):
        learn_on(routed, batches, batches, 0.6, num_steps=2)


@pytest.mark.gpu
def test_values_are_learnt_on_a_gpu_in_half_precision():
    routed = with_values(make_static(head_dim=32).to("cuda"), window_size=4, length=T)
    batches = [ids.cuda() for ids in make_batches(8)]
    learn_values(routed, batches, num_steps=8, autocast=torch.bfloat16)
    find_price(routed, batches, 0.6)
    with torch.no_grad():
        outs = [routed(ids, use_cache=False, output_routed_cost=True) for ids in batches]
    costs = torch.stack([out.routed_cost for out in outs])
    assert 0.0 < costs.mean().item() <= 0.6
    assert all(p.dtype == torch.float32 for p in router_parameters(routed))
