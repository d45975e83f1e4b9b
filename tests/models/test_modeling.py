"""The language model: loads, saves, trains and generates like any Transformers model."""

import math
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from meta_attention import MetaAttentionCache, MetaAttentionConfig
from meta_attention.errors import ConfigError, ShapeError


def test_loss_is_the_sum_of_its_parts(make_model, tokens):
    ids = tokens()
    for kwargs in ({"kl_weight": 0.3}, {"controller": "prior_free", "cost_weight": 2.0}):
        model = make_model(**kwargs)
        out = model(ids, labels=ids)
        config = model.config
        expected = (
            out.task_loss + config.kl_weight * out.kl + config.cost_weight * out.projected_cost
        )
        torch.testing.assert_close(out.loss, expected)
        logits = out.logits[:, :-1].flatten(0, 1)
        torch.testing.assert_close(
            out.task_loss, torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        )


def test_kl_is_the_mean_over_routed_layers_and_real_tokens(make_model, tokens):
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    routed = make_model()(ids, attention_mask=mask, output_routing=True)
    prior = torch.tensor([0.01, 0.86, 0.71])
    from meta_attention import RoutingPosterior

    kls = [RoutingPosterior(c).kl_to(prior)[mask.bool()] for c in routed.concentrations]
    torch.testing.assert_close(routed.kl, torch.stack(kls).mean())
    static = make_model(layer_experts=[["local"], ["local"], ["full", "local"]])
    out = static(ids, output_routing=True)
    assert out.kl > 0.1
    assert make_model(experts=("full",))(ids).kl == 0.0


def test_labels_of_minus_100_are_not_scored(make_model, tokens):
    model, ids = make_model(), tokens()
    labels = ids.clone()
    labels[:, :10] = -100
    logits = model(ids).logits[:, 9:-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 10:].flatten())
    torch.testing.assert_close(model(ids, labels=labels).task_loss, expected)


def test_routing_comes_on_request_only(make_model, tokens):
    model, ids = make_model(), tokens()
    assert model(ids).routing_weights is None
    out = model(ids, output_routing=True)
    assert [w.shape for w in out.routing_weights] == [(2, 24, 3)] * 3
    assert [c.shape for c in out.concentrations] == [(2, 24, 3)] * 3
    prior_free = make_model(controller="prior_free")(ids, output_routing=True)
    assert prior_free.concentrations == (None, None, None)


def test_padding_changes_nothing(make_model, tokens):
    model, ids = make_model(), tokens()
    alone = model(ids[:1, 9:]).logits
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    torch.testing.assert_close(
        model(ids, attention_mask=mask).logits[:1, 9:], alone, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"short_conv": 4, "attention_bias": True},
        {"num_sinks": 2},
        {"num_sinks": 2, "routing": "hard"},
    ],
    ids=str,
)
def test_packed_documents_are_as_if_alone(make_model, tokens, options):
    model, ids = make_model(**options), tokens(B=1)
    documents = torch.tensor([[1] * 7 + [2] * 12 + [3] * 5])
    packed = model(ids, document_ids=documents).logits
    alone = [model(part).logits for part in ids.split([7, 12, 5], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numbers", [(3, 2, 1), (1, 2, 1), (7, 9, 900_000_000)])
def test_documents_may_have_any_numbers(make_model, tokens, numbers):
    model, ids = make_model(), tokens(B=1)
    first, second, third = numbers
    documents = torch.tensor([[first] * 7 + [second] * 12 + [third] * 5])
    packed = model(ids, document_ids=documents).logits
    alone = [model(part).logits for part in ids.split([7, 12, 5], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)


def test_document_zero_and_the_mask_are_the_same_padding(make_model, tokens):
    model, ids = make_model(), tokens(B=1)
    mask = torch.ones_like(ids)
    mask[:, :9] = 0
    masked = model(ids, attention_mask=mask, use_cache=False)
    for arguments in (
        {"document_ids": mask},
        {"document_ids": torch.ones_like(ids), "attention_mask": mask},
    ):
        out = model(ids, **arguments)
        torch.testing.assert_close(out.logits[:, 9:], masked.logits[:, 9:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.kl, masked.kl)
        torch.testing.assert_close(out.projected_cost, masked.projected_cost)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(5).long()}, r"whole numbers \[B, T\], got torch.int64 \[5\]"),
        ({"input_ids": torch.ones(2, 5)}, "got torch.float32"),
        ({"inputs_embeds": torch.ones(5, 32)}, r"inputs_embeds must be \[B, T, D\], got \[5, 32\]"),
        ({"labels": torch.ones(2, 3).long()}, r"\[2, 5\] .* got \[2, 3\]"),
        ({"labels": torch.ones(2, 5).long(), "logits_to_keep": 1}, "logits_to_keep=1"),
        ({"attention_mask": torch.ones(5).long()}, r"\[2, 5\].* got \[5\]"),
        ({"attention_mask": torch.ones(2, 5)}, "boolean or whole numbers"),
        ({"document_ids": torch.ones(2, 4).long()}, r"\[2, 5\].* got \[2, 4\]"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_wrong_inputs_get_one_clear_sentence(make_model, arguments, message, training):
    model = make_model().train(training)
    if "inputs_embeds" not in arguments:
        arguments = {"input_ids": torch.ones(2, 5).long()} | arguments
    with pytest.raises(ShapeError, match=message) as error:
        model(**arguments)
    assert "\n" not in str(error.value)


def test_the_threshold_is_not_rounded_in_a_half_precision_model(make_model):
    model = make_model(routing="gated", uncertainty_threshold=0.7).bfloat16()
    threshold = model.model.layers[0].attention.controller.uncertainty_threshold
    assert threshold.item() == torch.tensor(0.7).item()
    with pytest.raises(ConfigError, match="must be a finite number, got nan"):
        model.set_uncertainty_threshold(float("nan"))


def test_a_static_hybrid_is_one_line_of_config(make_model, tokens):
    model = make_model(layer_experts=[["local"], ["local"], ["full"]])
    assert not any("controller" in name for name, _ in model.named_parameters())
    out = model(tokens(), labels=tokens())
    torch.testing.assert_close(out.loss, out.task_loss)
    out.loss.backward()


def test_a_new_model_starts_on_the_expert_it_is_told_and_a_loaded_one_as_it_was(
    make_model, tokens, tmp_path
):
    layers = [["full", "local"], ["linear", "local"], ["local"]]
    ids = tokens()
    # small random weights, as in training
    model = make_model(start_expert="full", layer_experts=layers, initializer_range=0.02)
    plain = make_model(layer_experts=layers, initializer_range=0.02)
    weights, others = (m(ids, output_routing=True).routing_weights for m in (model, plain))
    assert weights[0][..., 0].min() > 0.7
    assert others[0][..., 0].max() < 0.5
    # a layer without that expert starts as it would have, and nothing else is drawn differently
    name = "model.layers.0.attention.controller.mlp.2.bias"
    for key, tensor in plain.state_dict().items():
        assert tensor.equal(model.state_dict()[key]) == (key != name), key
    with torch.no_grad():
        model.get_parameter(name).copy_(torch.tensor([-3.0, 3.0]))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert tensor.equal(loaded.state_dict()[key]), key
    assert loaded(ids, output_routing=True).routing_weights[0][..., 0].max() < 0.5


def test_routed_cost_is_that_of_evaluations_routes(make_model, tokens):
    layers = [["full", "linear", "local"], ["local"], ["full", "local"]]
    model = make_model(layer_experts=layers, routing="hard", training_weights="one_hot")
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    mask[1, :9] = 0
    out = model(ids, mask, output_routing=True, output_routed_cost=True)
    costs = [layer.attention.controller.costs for layer in model.model.layers]
    executed = [
        (w * c).sum(-1)[mask.bool()].mean() for w, c in zip(out.routing_weights, costs, strict=True)
    ]
    expected = (executed[0] + executed[2]) / 2
    torch.testing.assert_close(out.routed_cost, expected)
    # drawn routes differ, and what is said of evaluation does not
    training = model.train()(ids, mask, labels=ids, output_routed_cost=True)
    torch.testing.assert_close(training.routed_cost, expected)
    assert not training.routed_cost.requires_grad
    assert model(ids, mask, labels=ids).routed_cost is None


@pytest.mark.parametrize("controller", ["bayesian", "prior_free"])
def test_routing_entropy_is_that_of_the_belief_also_where_routes_are_drawn(
    make_model, tokens, controller
):
    layers = [["full", "linear", "local"], ["local"], ["full", "local"]]
    model = make_model(
        layer_experts=layers, controller=controller, uncertainty_signal="margin", routing="soft"
    )
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    mask[1, :9] = 0
    out = model(ids, mask, output_routing=True, output_routing_entropy=True)
    shares = [
        torch.special.entr(weights).sum(-1)[mask.bool()].mean() / math.log(len(names))
        for weights, names in zip(out.routing_weights, layers, strict=True)
        if len(names) > 1
    ]
    # soft weights are the belief itself
    torch.testing.assert_close(out.routing_entropy, sum(shares) / 2)
    # drawn routes change what later layers see, so that of a model with one routed layer
    one = make_model(
        layer_experts=layers[:1],
        num_hidden_layers=1,
        controller=controller,
        uncertainty_signal="margin",
        routing="soft",
    )
    soft = one(ids, mask, output_routing_entropy=True).routing_entropy
    one.config.routing, one.config.training_weights = "hard", "one_hot"
    drawn = one.train()(ids, mask, labels=ids, output_routing_entropy=True).routing_entropy
    torch.testing.assert_close(drawn, soft)
    assert not drawn.requires_grad
    assert one(ids, mask, labels=ids).routing_entropy is None


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_models_agree(make_model, tokens, tmp_path, tied):
    model, ids = make_model(tie_word_embeddings=tied), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    prior = loaded.model.layers[0].attention.controller.prior_concentration
    assert prior.tolist() == pytest.approx([0.01, 0.86, 0.71])


def test_a_model_loaded_in_bfloat16_keeps_its_controller(make_model, tokens, tmp_path):
    make_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert model.lm_head.weight.dtype == torch.bfloat16
    controller = model.model.layers[0].attention.controller
    for tensor in (*controller.parameters(), *controller.buffers()):
        assert tensor.dtype == torch.float32
    out = model(tokens(), output_routing=True)
    assert out.logits.dtype == torch.bfloat16
    assert out.routing_weights[0].dtype == torch.float32
    exact = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(tokens(), output_routing=True)
    torch.testing.assert_close(
        out.routing_weights[0], exact.routing_weights[0], rtol=0.05, atol=0.05
    )


def test_auto_classes_know_the_model(tmp_path, make_model):
    make_model().save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MetaAttentionConfig)
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "MetaAttentionModel"


def test_a_fresh_process_generates_with_two_imports(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    code = (
        "import meta_attention, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([1, 7])" in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        {"training_weights": "mean"},
        {"training_weights": "sample"},
        {"training_weights": "one_hot", "routing": "hard", "route_gradient": "chosen"},
        {
            "training_weights": "one_hot",
            "routing": "gated",
            "uncertainty_signal": "margin",
            "uncertainty_threshold": 0.5,
            "route_gradient": "chosen",
        },
    ],
    ids=["mean", "sample", "drawn", "gated"],
)
def test_gradient_checkpointing_changes_no_gradient(make_model, tokens, options):
    """Routes that were drawn are drawn again."""
    model, ids = make_model(**options).train(), tokens()

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    for ours, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradient_checkpointing_and_a_cache_exclude_each_other(make_model, tokens):
    model = make_model().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="would write the cache twice"):
        model(tokens(), past_key_values=MetaAttentionCache(model.config))


@pytest.mark.parametrize(("training", "num_sinks"), [(True, 0), (False, 0), (True, 2)])
def test_compiles_without_graph_breaks(make_model, tokens, training, num_sinks):
    model = make_model(training_weights="mean", num_sinks=num_sinks).train(training)
    ids = tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours = compiled(ids, labels=ids, use_cache=False)
    expected = model(ids, labels=ids, use_cache=False)
    torch.testing.assert_close(ours.loss, expected.loss)
    if training:
        ours.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    torch._dynamo.reset()


GENERATION = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "chunked prompt": {"do_sample": False, "prefill_chunk_size": 7},
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("how", GENERATION)
def test_generation_with_a_cache_equals_generation_without(make_model, tokens, how, padded):
    model, ids = make_model(), tokens()
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :9], mask[0, :9] = 0, 0
    arguments = {"attention_mask": mask, "max_new_tokens": 12} | GENERATION[how]
    torch.manual_seed(0)
    cached = model.generate(ids, **arguments)
    arguments.pop("prefill_chunk_size", None)
    torch.manual_seed(0)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **arguments))


def test_a_left_padded_row_generates_as_if_alone(make_model, tokens):
    model, ids = make_model(), tokens()
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 0, 0
    batched = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    alone = model.generate(ids[:1, 9:], max_new_tokens=12, do_sample=False)
    assert torch.equal(batched[:1, 9:], alone)


def test_a_conversation_goes_on_from_its_cache(make_model, tokens):
    model, prompt = make_model(), tokens(B=1, T=10)
    cache = MetaAttentionCache(model.config)
    first = model.generate(prompt, past_key_values=cache, max_new_tokens=6, do_sample=False)
    more = torch.cat([first, tokens(B=1, T=5, seed=1)], dim=1)
    second = model.generate(more, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(second, model.generate(more, max_new_tokens=6, do_sample=False))


def test_moving_the_threshold_moves_tokens_from_soft_to_hard(make_model, tokens, tmp_path):
    model, ids = make_model(routing="gated", uncertainty_threshold=-1e3), tokens()
    soft, hard = make_model(), make_model(routing="hard")
    torch.testing.assert_close(model(ids).logits, soft(ids).logits)
    model.set_uncertainty_threshold(1e3)
    torch.testing.assert_close(model(ids).logits, hard(ids).logits)
    assert not torch.allclose(soft(ids).logits, hard(ids).logits)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, hard(ids).logits)
    with pytest.raises(ConfigError, match="a threshold is for routing='gated'"):
        soft.set_uncertainty_threshold(0.5)


@pytest.mark.parametrize("training_weights", ["mean", "sample"])
def test_a_hard_routed_model_trains_its_controllers(make_model, tokens, training_weights):
    model = make_model(routing="hard", training_weights=training_weights, kl_weight=0.0).train()
    model(tokens(), labels=tokens()).loss.backward()
    for block in model.model.layers:
        last = block.attention.controller.mlp[2].weight.grad
        assert (last.abs().sum(dim=1) > 0).all(), "an expert's evidence has no gradient"


def test_other_cache_implementations_are_refused(make_model, tokens):
    with pytest.raises(ConfigError, match="must be 'static' or left out, got 'quantized'"):
        make_model().generate(tokens(), max_new_tokens=2, cache_implementation="quantized")


def test_logits_of_the_last_tokens_only(make_model, tokens):
    model, ids = make_model(), tokens()
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, model(ids).logits[:, -3:])


def test_embeddings_in_place_of_tokens(make_model, tokens):
    model, ids = make_model(), tokens()
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
    with pytest.raises(ShapeError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=embeds)


def test_hidden_states_on_request(make_model, tokens):
    states = make_model()(tokens(), output_hidden_states=True).hidden_states
    assert [s.shape for s in states] == [(2, 24, 32)] * 4


@pytest.mark.gpu
def test_bfloat16_on_the_gpu_decodes_as_it_prefills(make_model, tokens):
    model, ids = make_model().to("cuda", torch.bfloat16), tokens().cuda()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = MetaAttentionCache(model.config)
        steps = [
            model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(ids.shape[1])
        ]
    error = (torch.cat(steps, dim=1) - whole).float().abs().max()
    assert error <= 0.05 * whole.float().abs().max()
    assert model.generate(ids, max_new_tokens=8, do_sample=False).shape == (2, 32)


def test_reentrant_checkpointing_is_refused(make_model):
    """It would train next to nothing, without a word."""
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        make_model().gradient_checkpointing_enable({"use_reentrant": True})
