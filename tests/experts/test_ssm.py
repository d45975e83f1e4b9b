"""The state-space expert: its recurrence, Mamba-2's, and what it is at the start."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from meta_attention import Heads, MetaAttentionConfig, MetaAttentionForCausalLM, adapt
from meta_attention.adapt import AdaptConfig, collect_routing, freeze_base
from meta_attention.errors import ConfigError
from meta_attention.experts import SelectiveStateSpace, build_experts, expert_costs
from meta_attention.ops.route_plan import plan_routes
from meta_attention.testing import assert_within_error_budget, naive_state_space
from meta_attention.testing.pretrained import build_base, draw_tokens, randomise_controllers

NAN = float("nan")
B, T, D, H, K, P = 2, 150, 32, 4, 2, 8


def make_expert(dtype=torch.float64, **kwargs) -> SelectiveStateSpace:
    defaults = {"hidden_size": D, "num_attention_heads": H, "num_key_value_heads": K}
    config = MetaAttentionConfig(experts=("ssm",), **(defaults | kwargs))
    expert = build_experts(config, 0)["ssm"].to(dtype)
    assert isinstance(expert, SelectiveStateSpace)
    with torch.no_grad():
        expert.rates.skip.normal_()
    return expert


def make_inputs(dtype=torch.float64) -> list[torch.Tensor]:
    """Queries, keys, values, and the layer's input."""
    shapes = ((B, T, H, P), (B, T, K, P), (B, T, K, P), (B, T, D))
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def make_mask(kind: str) -> torch.Tensor | None:
    position = torch.arange(T).expand(B, T)
    is_token = position >= torch.tensor([[9], [70]])
    documents = (1 + position // torch.tensor([[37], [64]])) * (position < T - 5)
    # padding within a document, which goes on after it
    documents = documents.masked_fill((position >= 80) & (position < 85), 0)
    right = position < torch.tensor([[140], [3]])
    return {"none": None, "left": is_token, "right": right, "documents": documents}[kind]


def define(expert, query, key, value, x, mask=None, state=None):
    """Rows and state by the definition."""
    rates = expert.rates
    step = F.softplus(x @ expert.step_proj.weight.T + rates.step_bias)
    given = {"step": step, "rate": rates.log_rate.exp(), "skip": rates.skip}
    return naive_state_space(query, key, value, **given, mask=mask, state=state)


@pytest.mark.parametrize("mask", ["none", "left", "right", "documents"])
def test_it_is_its_recurrence_gradients_included(mask):
    expert, inputs, mask = make_expert(), make_inputs(), make_mask(mask)
    *heads, x = inputs
    rows, state = expert(Heads(*heads), x, mask, None)
    expected, after = define(expert, *inputs, mask)
    torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state[..., :P], after, rtol=1e-9, atol=1e-9)
    up, up_state = torch.randn_like(rows), torch.randn_like(after)
    used = [*inputs, *expert.parameters()]
    ours = torch.autograd.grad((rows, state[..., :P]), used, (up, up_state))
    theirs = torch.autograd.grad((expected, after), used, (up, up_state))
    for actual, exact in zip(ours, theirs, strict=True):
        assert exact.abs().max() > 0
        torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_listed_rows_are_as_accurate_as_plain_pytorch(impl, kernel_device):
    """Gradients included; what is not listed is poisoned, and the state is of all tokens."""
    mask = make_mask("left")
    listed = (torch.rand(B, T, 1, generator=torch.Generator().manual_seed(5)) < 0.3).float()
    is_row = ((listed > 0) & mask.unsqueeze(-1)).unsqueeze(-1)
    ups = torch.randn(B, T, H, P), torch.randn(B, K, P, P)

    def run(dtype, form, device="cpu"):
        torch.manual_seed(1)
        expert = make_expert(dtype, impl=impl).to(device)
        inputs = [x.detach().to(device).requires_grad_() for x in make_inputs(dtype)]
        *heads, x = inputs
        if form == "defined":
            rows, state = define(expert, *inputs, mask)
            up = ups[0].to(dtype) * is_row
        else:
            queries = plan_routes(listed.to(device), mask=mask.to(device), is_exclusive=True)
            buffer = torch.full_like(heads[0], NAN).detach()
            rows, state = expert.attend(
                Heads(*heads), x, mask.to(device), None, queries.list_of(0), buffer
            )
            assert rows.detach().cpu().masked_select(~is_row).isnan().all()
            up = ups[0].to(dtype).masked_fill(~is_row, NAN)
        state = state[..., :P]
        used = [*inputs, *expert.parameters()]
        grads = torch.autograd.grad(
            (rows, state), used, (up.to(device), ups[1].to(state)), allow_unused=False
        )
        rows = rows.detach().cpu().masked_fill(~is_row, 0.0)
        grads = [g.cpu() for g in grads]
        # the rounding of a few numbers is a matter of luck
        rates = torch.cat([g.flatten() for g in grads[4:]])
        return [rows, state.detach().cpu(), *grads[:4], rates]

    exact, plain = run(torch.float64, "defined"), run(torch.float32, "defined")
    ours = run(torch.float32, "listed", kernel_device)
    names = ["rows", "state", "query", "key", "value", "x", "parameters"]
    for name, *found in zip(names, ours, exact, plain, strict=True):
        # the gradient of a decay sums what passes it, up to a chunk of terms
        assert_within_error_budget(name, *found, roundings=T**0.5)


@pytest.mark.parametrize("sizes", [[1] * T, [60, 1, 64, 25], [149, 1]], ids=["one", "some", "last"])
def test_parts_of_a_sequence_give_the_whole(sizes):
    expert, (*heads, x), mask = make_expert(), make_inputs(), make_mask("left")
    with torch.no_grad():
        whole, last = expert(Heads(*heads), x, mask, None)
        parts, state, start = [], None, 0
        for size in sizes:
            part = slice(start, start + size)
            own = Heads(*(h[:, part] for h in heads))
            rows, state = expert(own, x[:, part], mask[:, part], state)
            parts.append(rows)
            start += size
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, last)


def make_mixer():
    """Transformers' Mamba-2 layer, whose convolution mixes and whose heads forget at their own
    pace; and an expert of the same weights."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=D,
        num_heads=4,
        head_dim=16,
        state_size=16,
        expand=2,
        n_groups=4,
        conv_kernel=4,
        use_conv_bias=False,
        chunk_size=32,
        num_hidden_layers=1,
    )
    mixer = Mamba2Mixer(config, layer_idx=0)
    config = MetaAttentionConfig(
        hidden_size=D, num_attention_heads=4, head_dim=16, experts=("ssm",)
    )
    expert = build_experts(config, 0)["ssm"]
    with torch.no_grad():
        mixer.conv1d.weight.normal_(std=0.4)
        mixer.A_log.copy_(torch.tensor([0.1, 1.0, 2.0, 2.7]))
        mixer.dt_bias.copy_(torch.tensor([-5.0, -3.0, -1.0, 0.5]))
        mixer.D.normal_()
        expert.step_proj.weight.copy_(mixer.in_proj.weight[-4:])
        expert.rates.log_rate.copy_(mixer.A_log)
        expert.rates.step_bias.copy_(mixer.dt_bias)
        expert.rates.skip.copy_(mixer.D)
    return mixer, expert


def heads_of(mixer, tokens):
    """What the state space of a mixer is given: C, B and x for queries, keys and values."""
    _, projected, _ = mixer.in_proj(tokens).split((64, 192, 4), dim=-1)
    weight = mixer.conv1d.weight
    convolved = F.conv1d(F.pad(projected.mT, (3, 0)), weight, groups=192).mT
    x, b, c = F.silu(convolved).unflatten(-1, (-1, 16)).split(4, dim=2)
    return Heads(c, b, x)


def rows_of(mixer, tokens):
    """What the state space of a mixer gives, before it is gated."""
    seen = []
    with mixer.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        mixer(tokens)
    return seen[0].reshape(*tokens.shape[:2], 4, 16)


def test_it_is_the_state_space_of_transformers_mamba2():
    tokens, (mixer, expert) = torch.randn(2, 100, D), make_mixer()
    with torch.no_grad():
        heads, expected = heads_of(mixer, tokens), rows_of(mixer, tokens)
        rows, _ = expert(heads, tokens, None, None)
        assert (expected - mixer.D[:, None] * heads.value).abs().max() > 0.05
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
        # and step by step
        state, steps = None, []
        for t in range(100):
            own = Heads(*(h[:, t : t + 1] for h in (heads.query, heads.key, heads.value)))
            row, state = expert(own, tokens[:, t : t + 1], None, state)
            steps.append(row)
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_it_learns_as_transformers_mamba2_does():
    """Gradients of what is learnt, on the same projections and through the same convolution."""
    tokens, (mixer, expert) = torch.randn(2, 100, D), make_mixer()
    expected = rows_of(mixer, tokens)
    # theirs computes in float32 whatever it is given
    exact, tokens, expert = deepcopy(mixer).double(), tokens.double(), expert.double()
    rows, _ = expert(heads_of(exact, tokens), tokens, None, None)
    torch.testing.assert_close(rows.float(), expected, rtol=1e-5, atol=1e-5)
    up, rates = torch.randn_like(expected), expert.rates
    used = (rates.log_rate, rates.step_bias, rates.skip, exact.conv1d.weight, exact.in_proj.weight)
    *ours, steps = torch.autograd.grad(rows, (*used, expert.step_proj.weight), up.double())
    # steps have a projection of their own, which is the last rows of in_proj there
    ours[-1][-4:] += steps
    used = (mixer.A_log, mixer.dt_bias, mixer.D, mixer.conv1d.weight, mixer.in_proj.weight)
    for actual, theirs in zip(ours, torch.autograd.grad(expected, used, up), strict=True):
        size = theirs.abs().max().item()
        assert size > 0.0
        torch.testing.assert_close(actual.float(), theirs, rtol=0.0, atol=1e-5 * size)


def test_a_new_one_has_mamba2s_rates_and_steps():
    expert = make_expert(
        torch.float32, num_attention_heads=512, num_key_value_heads=512, head_dim=2
    )
    rate, step = expert.rates.log_rate.exp(), F.softplus(expert.rates.step_bias)
    assert 1.0 <= rate.min() < 2.0
    assert 15.0 < rate.max() <= 16.0
    assert 0.00099 < step.min() < 0.0015
    assert 0.08 < step.max() < 0.101
    # evenly in the logarithm
    assert 0.4 < (step < 0.01).float().mean() < 0.6
    fresh = build_experts(
        MetaAttentionConfig(hidden_size=D, num_attention_heads=H, experts=("ssm",)), 0
    )["ssm"]
    assert torch.equal(fresh.rates.skip, torch.ones(H))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_large_steps_and_strong_decay_stay_finite_and_exact(size, impl, kernel_device):
    """Some tokens erase everything, others hardly anything: in float32, gradients included."""

    def run(dtype, form, device="cpu"):
        torch.manual_seed(2)
        expert = make_expert(dtype, impl=impl).to(device)
        inputs = [x.detach().to(device).requires_grad_() for x in make_inputs(dtype)]
        *heads, x = inputs
        with torch.no_grad():
            expert.step_proj.weight.normal_(std=size / D**0.5)
            heads[1].mul_(1 / size)
        if form == "defined":
            rows, _ = define(expert, *inputs)
        else:
            rows, _ = expert(Heads(*heads), x, None, None)
        grads = torch.autograd.grad(rows.sum(), [*heads, *expert.parameters()])
        assert all(g.isfinite().all() for g in grads)
        return rows.detach().cpu()

    exact, plain = (run(dtype, "defined") for dtype in (torch.float64, torch.float32))
    actual = run(torch.float32, "expert", kernel_device)
    # a chunk sums logarithms of up to 30 each
    rounding = 256 * 30 * torch.finfo(torch.float32).eps
    error = (plain.double() - exact).abs().max().item()
    assert (actual - exact).abs().max() <= 2 * error + rounding * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rates_and_state_stay_in_float32(dtype):
    config = MetaAttentionConfig(
        vocab_size=11,
        hidden_size=D,
        num_attention_heads=H,
        num_hidden_layers=1,
        experts=("ssm",),
        expert_costs="flops",
    )
    expert = MetaAttentionForCausalLM(config).to(dtype).model.layers[0].attention.experts[0]
    assert {p.dtype for p in expert.rates.parameters()} == {torch.float32}
    assert expert.step_proj.weight.dtype == dtype
    *heads, x = (x.detach().to(dtype) for x in make_inputs())
    heads[1:] = [h.repeat(1, 1, H // K, 1) for h in heads[1:]]
    rows, state = expert(Heads(*heads), x, None, None)
    assert (rows.dtype, state.dtype) == (dtype, torch.float32)
    assert rows.isfinite().all()


def test_a_saved_model_keeps_its_rates(tmp_path):
    config = MetaAttentionConfig(
        vocab_size=11,
        hidden_size=D,
        num_attention_heads=H,
        num_hidden_layers=1,
        experts=("full", "ssm"),
        expert_costs="flops",
    )
    model = MetaAttentionForCausalLM(config)
    model.save_pretrained(tmp_path)
    torch.manual_seed(9)
    loaded = MetaAttentionForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours, theirs = (
        {n: p for n, p in m.named_parameters() if ".rates." in n} for m in (model, loaded)
    )
    assert len(ours) == 3
    for name, p in ours.items():
        assert torch.equal(p, theirs[name])


def test_it_must_be_causal():
    with pytest.raises(ConfigError, match="'ssm' needs causal=True"):
        make_expert(causal=False)


def test_the_paper_gives_it_no_cost_but_it_can_be_counted():
    config = MetaAttentionConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024,
        experts=("full", "ssm"),
    )
    experts = build_experts(config, 0)
    with pytest.raises(ConfigError, match="the paper gives no cost for expert 'ssm'"):
        expert_costs(config, experts)
    config.expert_costs = "flops"
    # a step size of 256 inputs, a state of 64 x 64 written and read, by each of 4 heads; full
    # attention multiplies 512.5 keys and values of 64
    counted = (256 + 2 * 64 * 64) / (2 * 512.5 * 64)
    assert list(expert_costs(config, experts)) == [1.0, pytest.approx(counted)]


@pytest.mark.parametrize("routing", ["soft", "hard"])
def test_it_learns_in_a_pretrained_model(routing):
    """Its adapters are saved and it decodes: tests/adapt."""
    settings = AdaptConfig(experts=("full", "ssm", "local"), window_size=4, routing=routing)
    model = adapt(build_base("llama"), settings).train()
    randomise_controllers(model)
    freeze_base(model)
    ids, losses = draw_tokens(2, 16), []
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(learned.values(), lr=1e-3)
    for _ in range(5):
        # hard routes are drawn
        torch.manual_seed(0)
        with collect_routing(model) as record:
            loss = model(ids, labels=ids).loss + record.kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rates = {name.rpartition(".rates.")[2] for name in learned if ".rates." in name}
    assert rates == {"log_rate", "step_bias", "skip"}
    assert [name for name, p in learned.items() if not p.grad.abs().max() > 0.0] == []
    assert losses[-1] < losses[0]
