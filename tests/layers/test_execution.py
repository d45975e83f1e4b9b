"""The running of experts on lists: only what was routed, and what all of it would have given.

What no list names is poisoned: uninitialised memory and the queries of other tokens hold NaN.

Shapes: B batch, T sequence, H heads, P head width, E experts, G key-value heads where each has a
route of its own, otherwise 1.
"""

import pytest
import torch

from meta_attention import (
    BayesianMetaAttentionLayer,
    Expert,
    MetaAttentionCache,
    MetaAttentionConfig,
    register_expert,
)
from meta_attention.experts import SoftmaxExpert, linear
from meta_attention.layers import execution
from meta_attention.routing import uncertainty_of
from meta_attention.testing import assert_within_error_budget

NAN = float("nan")
B, T, D = 2, 40, 64


@register_expert("test_mean")
class MeanAttention(Expert):
    """The mean of all values a token may see. Gives ``forward`` and knows nothing of lists."""

    paper_cost = 0.5
    keeps_documents_apart = True

    def forward(self, heads, x, mask):
        T, S = heads.query.shape[1], heads.key.shape[1]
        visible = torch.ones(1, T, S, dtype=torch.bool)
        if self.causal:
            visible = visible.tril(S - T)
        if mask is not None:
            same = mask[:, S - T :, None] == mask[:, None, :]
            visible = visible & same & (mask != 0)[:, None, :]
        weights = visible / visible.sum(dim=-1, keepdim=True).clamp(min=1)
        value = heads.value.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=2)
        return torch.einsum("bts,bshp->bthp", weights.to(value.dtype).expand(len(x), -1, -1), value)

    def flops(self, length):
        return self.attention_flops(length / 2) / 2


def make_layer(dtype=torch.float64, **kwargs):
    defaults = {
        "hidden_size": D,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "window_size": 5,
        "max_position_embeddings": 64,
        "controller_hidden_size": 8,
        "routing": "hard",
    }
    torch.manual_seed(0)
    layer = BayesianMetaAttentionLayer(MetaAttentionConfig(**(defaults | kwargs)))
    with torch.no_grad():
        # large enough that every expert has its tokens
        layer.controller.mlp[-1].weight.mul_(20)
        costs = layer.controller.costs
        layer.controller.mlp[-1].bias.view(-1, len(costs)).copy_(2.0 * costs - 1.0)
    return layer.to(dtype).eval()


def make_input(dtype=torch.float64):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def make_marks(kind: str) -> dict[str, torch.Tensor]:
    """Arguments of the layer that say what is padding."""
    position, row = torch.arange(T).expand(B, T), torch.arange(B)[:, None]
    return {
        "none": {},
        "left": {"attention_mask": (position >= 7 * row + 3).long()},
        "right": {"attention_mask": (position < T - 9 * row).long()},
        "row": {"attention_mask": (row > 0).long().expand(B, T)},
        "documents": {"document_ids": (1 + position // (11 + row)) * (position < T - 4)},
    }[kind]


def taken_of(routes, marks):
    """Who takes which expert [B, T, G, E]; padding takes none."""
    taken = routes.weights > 0
    taken = taken if taken.dim() == 4 else taken.unsqueeze(2)
    is_token = next(iter(marks.values()), torch.ones(B, T)) != 0
    return taken & is_token[:, :, None, None]


def run_all(layer, x, **marks):
    """The layer with all experts run on all tokens, whatever the routes."""
    layer.execution.plan = lambda routes, is_padding, routing: None
    try:
        return layer(x, **marks)
    finally:
        del layer.execution.plan


def gradients(layer, x, output):
    """Of a fixed weighted sum of the output, by parameter, and of the input."""
    upstream = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    layer.zero_grad()
    x.grad = None
    (output * upstream).sum().backward()
    return {name: p.grad for name, p in [*layer.named_parameters(), ("x", x)]}


@pytest.fixture
def poison(monkeypatch):
    """Uninitialised memory holds NaN."""

    def poisoned(make):
        def filled(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(NAN) if tensor.is_floating_point() else tensor

        return filled

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def executed(monkeypatch):
    """Tokens [B, T, G] each expert works on, by its index or name; it can read no other queries."""
    seen = {}
    routed_attention, linear_attention = execution.routed_attention, linear.linear_attention

    def hide(query, listed):
        listed = listed.repeat_interleave(query.shape[2] // listed.shape[2], dim=2)
        return query.masked_fill(~listed.unsqueeze(-1), NAN)

    def spy_softmax(query, key, value, plan, windows, **kwargs):
        lists = {index: plan.list_of(index).is_listed(T) for index in windows}
        seen.update(lists)
        union = torch.stack(list(lists.values())).any(dim=0)
        return routed_attention(hide(query, union), key, value, plan, windows, **kwargs)

    def spy_linear(query, key, value, queries, **kwargs):
        if queries is not None:
            name = "linear" if kwargs["normalise"] else "ssm"
            seen[name] = queries.is_listed(T)
            query = hide(query, seen[name])
        return linear_attention(query, key, value, queries=queries, **kwargs)

    monkeypatch.setattr(execution, "routed_attention", spy_softmax)
    monkeypatch.setattr(linear, "linear_attention", spy_linear)
    return seen


LAYERS = {
    "plain": {},
    "own": {"shared_projections": False},
    "bidirectional": {"causal": False},
    "gated_full": {"experts": ("full", "gated_full", "linear", "local")},
    "gated_full-own": {"experts": ("gated_full", "local"), "shared_projections": False},
    "user": {"experts": ("full", "test_mean", "linear")},
    "user-bidirectional": {"experts": ("test_mean", "local"), "causal": False},
    "no-softmax": {"experts": ("test_mean", "linear")},
    "one-kv-head": {"num_key_value_heads": 1, "use_rope": False},
    "prior_free": {"controller": "prior_free", "num_key_value_heads": 4},
    "kv_head": {"route_granularity": "kv_head"},
    "kv_head-all": {"route_granularity": "kv_head", "num_key_value_heads": 4, "causal": False},
    "kv_head-gated_full": {
        "route_granularity": "kv_head",
        "experts": ("full", "gated_full", "linear", "local"),
    },
    "sinks": {"num_sinks": 3},
    "sinks-kv_head": {
        "num_sinks": 3,
        "route_granularity": "kv_head",
        "experts": ("gated_full", "local"),
        "causal": False,
    },
    "ssm": {"experts": ("full", "ssm", "linear"), "expert_costs": (1.0, 0.2, 0.15)},
    "kv_head-ssm": {
        "route_granularity": "kv_head",
        "experts": ("ssm", "gated_full", "local"),
        "expert_costs": (0.2, 1.0, 0.3),
    },
    "ssm-own": {
        "experts": ("ssm", "local"),
        "expert_costs": (0.2, 0.3),
        "shared_projections": False,
    },
    "kv_head-user": {"route_granularity": "kv_head", "experts": ("full", "test_mean", "linear")},
}
LAYOUTS = {
    "shared": {},
    "own": {"shared_projections": False},
    "kv_head": {"route_granularity": "kv_head"},
}
# linear attention keeps documents apart only when causal
CASES = [
    (options, marks)
    for options in LAYERS
    for marks in ("none", "left", "right", "row", "documents")
    if not (options in ("bidirectional", "kv_head-all") and marks == "documents")
]


@pytest.mark.parametrize(("options", "marks"), CASES)
def test_hard_routing_executes_only_what_it_routed(options, marks, executed, poison):
    """Each expert gets its own tokens, and what it was not given changes nothing."""
    layer, x, marks = make_layer(**LAYERS[options]), make_input(), make_marks(marks)
    with torch.no_grad():
        out = layer(x, **marks)
        taken = taken_of(out.routes, marks)
        counts = taken.sum(dim=(0, 1))  # [G, E]
        assert (counts > 0).all(), "every expert must have tokens, or this shows nothing"
        for index, name in enumerate(layer.expert_names):
            listed = executed.get(name if name in ("linear", "ssm") else index)
            if name == "test_mean":
                assert listed is None
            else:
                assert torch.equal(listed.sum(dim=(0, 1)), counts[:, index])
                assert torch.equal(listed, taken[..., index])
        assert out.output.isfinite().all()
        torch.testing.assert_close(out.output, run_all(layer, x, **marks).output)


@pytest.mark.parametrize(("options", "marks"), CASES)
def test_training_on_chosen_routes_executes_only_these(options, marks, executed, poison):
    layer = make_layer(route_gradient="chosen", training_weights="one_hot", **LAYERS[options])
    layer.train()
    x, marks = make_input().requires_grad_(), make_marks(marks)
    torch.manual_seed(3)
    out = layer(x, **marks)
    taken = taken_of(out.routes, marks)
    for key, listed in executed.items():
        index = layer.expert_names.index(key) if isinstance(key, str) else key
        assert torch.equal(listed, taken[..., index])
    ours = gradients(layer, x, out.output)
    torch.manual_seed(3)
    expected = run_all(layer, x, **marks)
    assert torch.equal(out.routes.weights, expected.routes.weights)
    assert out.output.isfinite().all()
    torch.testing.assert_close(out.output, expected.output)
    for name, exact in gradients(layer, x, expected.output).items():
        torch.testing.assert_close(ours[name], exact, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("routing", ["hard", "gated"])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_lists_give_what_all_tokens_would(impl, routing, layout, poison, kernel_device):
    """Gradients included, with at most twice the rounding of all experts run on all tokens."""
    options = {"routing": routing, "route_gradient": "chosen", **LAYOUTS[layout]}
    if routing == "gated":
        options |= {"uncertainty_signal": "margin", "uncertainty_threshold": 0.4}
    marks = make_marks("left")

    def run(dtype, impl, forward, device="cpu"):
        layer = make_layer(dtype, impl=impl, **options).to(device).train()
        x = make_input(dtype).to(device).requires_grad_()
        out = forward(layer, x, **{name: mark.to(device) for name, mark in marks.items()})
        share = out.routes.hard.float().mean()
        assert share == 1 if routing == "hard" else 0 < share < 1
        found = gradients(layer, x, out.output)
        # by part of the layer: the rounding of one small tensor is a matter of luck
        parts = {"output": [out.output.detach()]}
        for name, gradient in found.items():
            parts.setdefault(name.split(".")[0], []).append(gradient)
        return {part: torch.cat([x.cpu().flatten() for x in xs]) for part, xs in parts.items()}

    exact = run(torch.float64, "reference", run_all)
    plain = run(torch.float32, "reference", run_all)
    ours = run(torch.float32, impl, BayesianMetaAttentionLayer.forward, kernel_device)
    for name in exact:
        assert_within_error_budget(name, ours[name], exact[name], plain[name])


@pytest.mark.parametrize("apart", [False, True], ids=["alike", "apart"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_and_soft_caps_of_experts_are_theirs_everywhere(layout, apart, poison):
    """On lists, on all tokens and in decoding; in calls of their own where experts differ."""
    layer, x = make_layer(num_sinks=3, **LAYOUTS[layout]), make_input()
    before = layer(x).output
    for expert in layer.experts:
        if isinstance(expert, SoftmaxExpert):
            expert.scale, expert.softcap = (0.7, 0.5 if apart and expert.window else 2.0)
    with torch.no_grad():
        out = layer(x).output
        assert ((out - before).abs().amax(dim=-1)[:, 1:] > 1e-6).float().mean() > 0.5
        torch.testing.assert_close(out, run_all(layer, x).output)
        cache = MetaAttentionCache(layer.config)
        parts = []
        for part in x.split([30, *[1] * 10], dim=1):
            _, step = cache.prepare(None, B, part.shape[1], x.device)
            parts.append(layer(part, past_key_values=cache, step=step).output)
        torch.testing.assert_close(torch.cat(parts, dim=1), out)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_a_rising_threshold_leads_from_soft_to_hard_token_by_token(shared, executed, poison):
    """Counts, executed rows and outputs: at each step only those of tokens that became hard."""
    options = {"shared_projections": shared, "uncertainty_signal": "mean_entropy"}
    gated = make_layer(routing="gated", uncertainty_threshold=0.0, **options)
    x = make_input()
    with torch.no_grad():
        soft, hard = (make_layer(routing=r, shared_projections=shared)(x) for r in ("soft", "hard"))
        uncertainty = uncertainty_of(soft.posterior, "mean_entropy").flatten().sort().values
        between = (uncertainty[1:] + uncertainty[:-1]) / 2
        thresholds = [uncertainty[0] - 1, *between[::4], between[-1], uncertainty[-1] + 1]
        counts, before = [], None
        for threshold in thresholds:
            gated.controller.uncertainty_threshold.fill_(threshold)
            out = gated(x)
            is_hard = out.routes.hard
            counts.append(int(is_hard.sum()))
            for index, name in enumerate(gated.expert_names):
                listed = executed["linear" if name == "linear" else index]
                chosen = is_hard & (hard.routes.expert == index)
                assert listed.sum() == (~is_hard).sum() + chosen.sum()
            if before is not None:
                changed = before.routes.hard != is_hard
                assert (is_hard | ~before.routes.hard).all()
                torch.testing.assert_close(out.output[~changed], before.output[~changed])
                # a first token sees only itself, by any expert
                changed[:, 0] = False
                assert ((out.output - before.output)[changed].abs().amax(dim=-1) > 1e-6).all()
            before = out
            if threshold == thresholds[0]:
                torch.testing.assert_close(out.output, soft.output)
                torch.testing.assert_close(out.routes.weights, soft.routes.weights)
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-2:] == [B * T - 1, B * T]
    torch.testing.assert_close(out.output, hard.output)
    torch.testing.assert_close(out.routes.weights, hard.routes.weights)


def define_chosen(layer, x, expert, is_hard, draw):
    """A training pass written out: all experts run, and the weights of those not chosen are 0."""
    positions = torch.arange(T).expand(B, T)
    belief = layer.controller(x, positions).mean  # [B, T, E] or [B, T, G, E]
    rise = belief - belief.detach()
    if draw == "one_hot":
        rise = rise / belief.detach()
    heads = layer._project(x, positions, None)
    rows = layer.execution.on_all(heads, x, None, None)
    output = torch.zeros_like(x)
    for index, row in enumerate(rows):
        taken = torch.where(expert == index, 1.0 + rise[..., index], 0.0)
        weight = torch.where(is_hard, taken, belief[..., index]).view(B, T, -1, 1)  # [B, T, G, 1]
        own = layer.projections[0 if layer.config.shared_projections else index]
        weighted = weight * row.unflatten(-1, (weight.shape[2], -1))
        output = output + own.o_proj(weighted.flatten(2))
    return output


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("routing", ["hard", "gated"])
@pytest.mark.parametrize("draw", ["mean", "one_hot"])
def test_chosen_routes_have_the_gradient_of_their_weights_alone(draw, routing, layout):
    gate = {"uncertainty_signal": "margin", "uncertainty_threshold": 0.4}
    layer = make_layer(
        routing=routing,
        training_weights=draw,
        route_gradient="chosen",
        **LAYOUTS[layout],
        **(gate if routing == "gated" else {}),
    ).train()
    x = make_input().requires_grad_()
    torch.manual_seed(3)
    out = layer(x)
    expert, is_hard = out.routes.expert, out.routes.hard
    assert torch.equal(expert, out.posterior.mean.argmax(dim=-1)) == (draw == "mean")
    assert is_hard.all() == (routing == "hard")
    ours = gradients(layer, x, out.output)
    expected = define_chosen(layer, x, expert, is_hard, draw)
    torch.testing.assert_close(out.output, expected)
    for name, exact in gradients(layer, x, expected).items():
        assert exact.abs().max() > 0, name
        torch.testing.assert_close(ours[name], exact, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("draw", ["mean", "sample", "one_hot"])
@pytest.mark.parametrize("routing", ["hard", "gated"])
def test_the_cost_of_chosen_routes_teaches_the_whole_belief(routing, draw):
    """Its value is that of the routes taken, its gradient that of the belief in all experts."""
    gate = {"uncertainty_signal": "margin", "uncertainty_threshold": 0.4}
    layer = make_layer(
        routing=routing,
        training_weights=draw,
        route_gradient="chosen",
        **(gate if routing == "gated" else {}),
    ).train()
    x, costs = make_input(), layer.controller.costs
    mask = make_marks("left")["attention_mask"]
    out = layer(x, mask)
    taken = (out.routes.weights * costs).sum(dim=-1).masked_fill(mask == 0, 0.0)
    assert torch.equal(out.projected_cost, taken)
    believed = ((out.posterior.mean * costs).sum(dim=-1) * mask).sum()
    parameters = list(layer.controller.parameters())
    expected = torch.autograd.grad(believed, parameters, retain_graph=True)
    ours = torch.autograd.grad(out.projected_cost.sum(), parameters)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "impl",
    [
        "triton",
        "reference",
    ],
)
@pytest.mark.parametrize("routing", ["hard", "gated"])
def test_an_expert_nobody_chose_has_a_gradient_of_zero(routing, impl, kernel_device):
    """None would stop a run of several processes, which wait for every parameter."""
    options = {"routing": routing, "route_gradient": "chosen", "shared_projections": False}
    if routing == "gated":
        options["uncertainty_threshold"] = 1e9
    layer = make_layer(torch.float32, impl=impl, **options).to(kernel_device).train()
    with torch.no_grad():
        layer.controller.mlp[-1].bias[1] = 1e3
    x = make_input(torch.float32)[:1, :9].to(kernel_device).requires_grad_()
    out = layer(x)
    assert (out.routes.expert == 1).all()
    found = gradients(layer, x, out.output)
    assert [name for name, grad in found.items() if grad is None] == []
    assert found["projections.1.q_proj.weight"].abs().max() > 0
    assert found["projections.0.q_proj.weight"].abs().max() == 0


def test_a_token_that_is_routed_nowhere_does_not_look_routed():
    """A belief of NaN is in no list: what the buffer held before must not pass for its row."""
    layer = make_layer(torch.float32, routing="hard", route_gradient="chosen").train()
    with torch.no_grad():
        layer.controller.mlp[-1].bias.fill_(float("nan"))
    x = torch.randn(1, 6, layer.config.hidden_size)
    assert layer(x).output.isnan().all()
