"""The Trainer: the objective, however a batch is computed, and what is logged of it."""

import json
import math
from itertools import pairwise

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.errors import ConfigError
from meta_attention.objective import routing_loss
from meta_attention.training.checkpoints import TrainingError
from meta_attention.training.corpus import Corpus, embedded_corpus
from meta_attention.training.logs import MetricsLog, read_metrics
from meta_attention.training.overrides import build_settings
from meta_attention.training.packing import pack
from meta_attention.training.recipes import demo
from meta_attention.training.run import training_arguments
from meta_attention.training.schedule import Schedule
from meta_attention.training.tokenizer import build_tokenizer
from meta_attention.training.trainer import MetaAttentionTrainer

# short documents, so that most blocks hold several
TEXT = Corpus("test", [text[:700] for text in embedded_corpus().documents[:40]])
TOKENIZER = build_tokenizer("bytes", TEXT)

ECONOMY = (
    *("target_cost", "cost_path", "hold", "argmax_from"),
    *("settle_drop", "settle_steps"),
)
HARD = {
    "routing": "hard",
    "training_weights": "one_hot",
    "start_expert": "full",
    "expert_costs": "flops",
}


def blocks(length=32, **kwargs):
    return pack(TEXT, TOKENIZER, length, **kwargs)


def build_model(seed=0, **fields):
    torch.manual_seed(seed)
    fields = {"kl_weight": 0.5, "num_hidden_layers": 2, "num_attention_heads": 2} | fields
    return MetaAttentionForCausalLM(
        MetaAttentionConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            controller_hidden_size=16,
            max_position_embeddings=64,
            window_size=4,
            pad_token_id=TOKENIZER.pad_token_id,
            eos_token_id=TOKENIZER.eos_token_id,
            **fields,
        )
    )


def build_trainer(folder, model=None, train=None, valid=None, callbacks=(), **arguments):
    settings = demo()
    args = training_arguments(settings, folder)
    arguments = {
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "warmup_steps": 0,
    } | arguments
    kl_weight = arguments.pop("kl_weight", None)
    cost_weight = arguments.pop("cost_weight", None)
    threshold = arguments.pop("uncertainty_threshold", None)
    economy = {n: arguments.pop(n) for n in ECONOMY if n in arguments}
    for name, value in arguments.items():
        setattr(args, name, value)
    return MetaAttentionTrainer(
        model or build_model(),
        args,
        train_dataset=train or blocks(),
        eval_dataset=valid,
        kl_weight=kl_weight,
        cost_weight=cost_weight,
        uncertainty_threshold=threshold,
        **economy,
        callbacks=[MetricsLog(folder), *callbacks],
    )


class KeepGradients(TrainerCallback):
    """Gradients of the first step, before they are used."""

    def __init__(self):
        self.gradients = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.gradients:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters()}


def train_rows(folder):
    return [row for row in read_metrics(folder) if row["kind"] == "train"]


def test_transformers_own_trainer_accumulates_the_same_gradient(tmp_path):
    gradients = []
    for size, parts in ((8, 1), (2, 4)):
        kept = KeepGradients()
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(build_model(), args, train_dataset=blocks(), callbacks=[kept]).train()
        gradients.append(kept.gradients)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


class KeepThresholds(TrainerCallback):
    """The threshold every step was trained with."""

    def __init__(self):
        self.values = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        controller = model.model.layers[0].attention.controller
        self.values.append(controller.uncertainty_threshold.item())


def test_a_rising_threshold_makes_tokens_hard(tmp_path):
    seen = KeepThresholds()
    model = build_model(routing="gated", uncertainty_threshold=0.0)
    schedule = Schedule(0.0, 1.0)
    trainer = build_trainer(
        tmp_path, model, callbacks=[seen], max_steps=5, uncertainty_threshold=schedule
    )
    trainer.train()
    assert seen.values == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    # no token is as unsure as that, and the saved config says so
    assert model.config.uncertainty_threshold == 1.0
    ids = blocks()[0]["input_ids"][None].to(model.device)
    weights = model.eval()(ids, output_routing=True).routing_weights
    assert all((layer.max(dim=-1).values == 1).all() for layer in weights)


def test_loss_falls_on_the_embedded_corpus(tmp_path):
    trainer = build_trainer(tmp_path, max_steps=60, per_device_train_batch_size=16, logging_steps=5)
    trainer.train()
    first, *_, last = train_rows(tmp_path)
    assert first["task_loss"] == pytest.approx(math.log(len(TOKENIZER)), abs=0.2)
    assert last["task_loss"] < first["task_loss"] - 1.5


def test_logged_loss_is_the_sum_of_its_parts(tmp_path):
    schedule = Schedule(0.0, 0.8)
    trainer = build_trainer(
        tmp_path, max_steps=9, logging_steps=4, kl_weight=schedule, cost_weight=0.3
    )
    trainer.train()
    rows = train_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 4, 8, 9]
    for row in rows:
        parts = row["task_loss"] + row["kl_loss"] + row["cost_loss"]
        assert row["loss"] == pytest.approx(parts, abs=1e-5)
        assert row["cost_loss"] == pytest.approx(0.3 * row["projected_cost"])
    # the schedule reaches its end with the last step
    assert [row["kl_weight"] for row in rows] == pytest.approx([0.0, 0.3, 0.7, 0.8])
    assert rows[-1]["kl_loss"] == pytest.approx(0.8 * rows[-1]["kl"])


def test_the_config_is_not_changed_by_the_schedule(tmp_path):
    trainer = build_trainer(tmp_path, kl_weight=Schedule(0.0, 3.0))
    before = trainer.model.config.to_dict()
    trainer.train()
    assert trainer.model.config.to_dict() == before
    assert before["use_cache"] is True


def test_first_loss_is_the_objective_of_the_first_batch(tmp_path):
    model = build_model()
    trainer = build_trainer(tmp_path, model, max_steps=1)
    dataset = trainer.train_dataset
    order = list(trainer._get_train_sampler())
    batch = torch.stack([dataset[index]["input_ids"] for index in order[:8]])
    with torch.no_grad():
        out = build_model()(batch, labels=batch)
    trainer.train()
    (row,) = train_rows(tmp_path)
    expected = routing_loss(out.task_loss, out.kl, kl_weight=0.5)
    assert row["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert row["task_loss"] == pytest.approx(out.task_loss.item(), abs=1e-5)
    assert row["kl"] == pytest.approx(out.kl.item(), abs=1e-5)
    assert row["projected_cost"] == pytest.approx(out.projected_cost.item(), abs=1e-5)


@pytest.mark.parametrize("isolate", [False, True], ids=["joined", "isolated"])
def test_accumulated_parts_give_the_loss_and_gradients_of_the_whole(isolate, tmp_path):
    # isolated documents make the number of predicted tokens differ from part to part
    data = blocks(isolate_documents=isolate)
    results = {}
    for size, parts in ((8, 1), (4, 2), (2, 4)):
        keep, folder = KeepGradients(), tmp_path / f"{size}"
        folder.mkdir()
        build_trainer(
            folder,
            train=data,
            callbacks=[keep],
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            cost_weight=0.2,
        ).train()
        results[size] = [row["loss"] for row in train_rows(folder)], keep.gradients
    losses, gradients = results[8]
    for other, other_gradients in (results[4], results[2]):
        assert other == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(other_gradients, gradients, atol=1e-6, rtol=1e-4)


def test_rows_have_every_figure(tmp_path):
    layer_experts = [["full", "linear", "local"], ["local"], ["full", "local"]]
    model = build_model(num_hidden_layers=3, layer_experts=layer_experts)
    build_trainer(tmp_path, model, max_steps=1).train()
    text = (tmp_path / "metrics.jsonl").read_text()
    (row,) = [json.loads(line) for line in text.splitlines()]
    assert {
        "step",
        "loss",
        "task_loss",
        "kl",
        "kl_weight",
        "projected_cost",
        "adaptivity",
        "routing_entropy",
        "expert_collapses",
        "prior_collapses",
        "tokens_per_s",
        "learning_rate",
        "grad_norm",
        "epoch",
    } <= set(row)
    for index, experts in enumerate(layer_experts):
        shares = [row[f"layer_{index}/share/{expert}"] for expert in experts]
        assert sum(shares) == pytest.approx(1.0, abs=1e-5)
        is_static = len(experts) == 1
        assert (f"layer_{index}/adaptivity" in row) is not is_static
        assert (f"layer_{index}/kl" in row) is not is_static
        for expert in experts:
            assert (f"layer_{index}/adaptivity/{expert}" in row) is not is_static
    assert row["tokens_per_s"] > 0


def test_routing_is_returned_on_logged_steps_only(tmp_path):
    model = build_model()
    asked = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs["output_routing"]), with_kwargs=True
    )
    build_trainer(tmp_path, model, max_steps=6, logging_steps=3).train()
    assert asked == [True, False, True, False, False, True]


def test_evaluation_agrees_with_the_model_and_weighs_tokens(tmp_path):
    valid = blocks(isolate_documents=True)
    model = build_model()
    trainer = build_trainer(tmp_path, model, valid=valid, per_device_eval_batch_size=7)
    metrics = trainer.evaluate()
    nats, tokens, costs = 0.0, 0, []
    with torch.no_grad():
        for block in valid:
            out = model(**{name: value.unsqueeze(0) for name, value in block.items()})
            predicted = (block["labels"][1:] != -100).sum().item()
            nats, tokens = nats + out.task_loss.item() * predicted, tokens + predicted
            costs.append(out.projected_cost.item())
    assert tokens == valid.num_target_tokens
    task_loss = metrics["eval_task_loss"]
    assert task_loss == pytest.approx(nats / tokens, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(task_loss))
    assert metrics["eval_bits_per_byte"] == pytest.approx(valid.bits_per_byte(task_loss))
    assert metrics["eval_projected_cost"] == pytest.approx(sum(costs) / len(costs), rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(task_loss + 0.5 * metrics["eval_kl"])


def test_static_baselines_and_a_prior_free_controller_train(tmp_path):
    for name, fields in {
        "full": {"experts": ["full"]},
        "hybrid": {"layer_experts": [["local"], ["full"]]},
        "prior_free": {"controller": "prior_free", "cost_weight": 0.1},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        build_trainer(folder, build_model(**fields), valid=blocks(), max_steps=2).train()
        rows = train_rows(folder)
        assert rows[-1]["kl"] == 0.0
        assert ("adaptivity" in rows[-1]) is (name == "prior_free")


@pytest.mark.parametrize("option", ["gradient_checkpointing", "bf16"])
def test_cheaper_steps_follow_the_same_curve(option, tmp_path):
    losses = {}
    for value in (False, True):
        folder = tmp_path / str(value)
        folder.mkdir()
        arguments = {option: value}
        if option == "bf16":
            arguments["mixed_precision"] = "bf16" if value else "no"
        build_trainer(folder, max_steps=3, **arguments).train()
        losses[value] = [row["loss"] for row in train_rows(folder)]
    assert losses[True] == pytest.approx(losses[False], abs=1e-5 if option != "bf16" else 0.02)
    assert option != "bf16" or losses[True] != losses[False]


def test_a_sampled_run_logs_what_it_believes_not_what_it_drew(tmp_path):
    # at initialisation every token has nearly the same posterior; its samples differ widely
    model = build_model(training_weights="sample")
    build_trainer(tmp_path, model, max_steps=1).train()
    (row,) = train_rows(tmp_path)
    assert row["adaptivity"] < 0.01


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path):
    model = build_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="the loss must be finite, got nan at step 1"):
        build_trainer(tmp_path, model).train()


def test_fsdp_without_gpus_is_refused_not_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="several processes with a GPU each, got 1 on cpu"):
        build_trainer(tmp_path)


def test_plaintraining_arguments_are_enough(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        use_cpu=True,
        report_to="none",
        dataloader_pin_memory=False,
        save_strategy="no",
    )
    trainer = MetaAttentionTrainer(build_model(), args, train_dataset=blocks())
    assert trainer.train().global_step == 2


@pytest.mark.parametrize(
    ("controller", "weight"),
    [("bayesian", "kl_weight"), ("bayesian", "cost_weight"), ("prior_free", "cost_weight")],
)
def test_the_cost_is_steered_to_the_target(controller, weight, tmp_path):
    """Text so short needs no full attention: what is left of it, the pressure takes."""
    model = build_model(**HARD, controller=controller)
    trainer = build_trainer(
        tmp_path,
        model,
        max_steps=80,
        logging_steps=10,
        learning_rate=1e-2,
        target_cost=0.5,
        **{weight: Schedule(0.0, 0.05, 0.25, 0.5)},
    )
    trainer.train()
    rows = train_rows(tmp_path)
    assert rows[0]["routed_cost"] == 1.0
    # the windows before the ramp say nothing
    assert [row["multiplier"] for row in rows[:3]] == [1.0] * 3
    steered = [row["multiplier"] for row in rows[3:]]
    assert all(multiplier != 1.0 for multiplier in steered[1:])
    for before, row in pairwise(rows[3:]):
        # up while the cost is above the target, down while it is below; seen a window later
        rise = row["multiplier"] - before["multiplier"]
        assert rise * (before["routed_cost"] - 0.5) >= 0.0
    for row in rows:
        assert row["target_cost"] == 0.5
        schedule = Schedule(0.0, 0.05, 0.25, 0.5).at(row["step"] - 1, 80)
        assert row[weight] == pytest.approx(schedule * row["multiplier"])
        if weight == "cost_weight":
            assert row["kl_weight"] == model.config.kl_weight  # not steered
        parts = row["task_loss"] + row["kl_loss"] + row["cost_loss"]
        assert row["loss"] == pytest.approx(parts, abs=1e-5)
    assert rows[-1]["routed_cost"] < 0.9


def test_a_loss_that_settles_begins_the_ramp_and_the_log_says_when(tmp_path):
    trainer = build_trainer(
        tmp_path,
        max_steps=60,
        learning_rate=1e-9,
        kl_weight=Schedule.parse("0->0.4@settled+20s"),
        settle_steps=10,
        logging_steps=5,
    )
    trainer.train()
    rows = {row["step"]: row for row in train_rows(tmp_path)}
    # nothing is learnt, so two windows of ten steps are alike
    assert "settled_step" not in rows[15]
    assert rows[60]["settled_step"] == 20
    weights = [rows[step]["kl_weight"] for step in (20, 25, 35, 60)]
    assert weights == pytest.approx([0.0, 0.4 * 4 / 20, 0.4 * 14 / 20, 0.4])


def test_a_target_that_cannot_be_reached_is_refused(tmp_path):
    message = r"target_cost must be between 0\.1\d+ and 1.000, .* got 0.05"
    with pytest.raises(ConfigError, match=message):
        build_trainer(tmp_path, build_model(**HARD), target_cost=0.05)


def test_a_path_is_of_the_layers_that_its_target_is_of(tmp_path):
    layers = [["local"], ["full", "local"]]
    model = build_model(**HARD, layer_experts=layers)
    build_trainer(tmp_path, model, target_cost=0.5)
    with pytest.raises(ConfigError, match="cost_path must have no static layers"):
        build_trainer(tmp_path, model, target_cost=0.5, cost_path=0.6)


def test_a_cost_below_its_target_is_held_up_from_when_it_is_pressed(tmp_path):
    """Of the routed layers alone: static ones cost what they do."""
    layers = [["local"], ["full", "local"]]
    model = build_model(layer_experts=layers, **HARD)
    pressed = Schedule.parse("0->0.5@0.5:0.75")
    options = {"kl_weight": pressed, "target_cost": 0.6, "hold": 3.0, "max_steps": 8}
    trainer = build_trainer(tmp_path, model, **options)
    (local,), (full, cheap) = trainer._tally.costs
    assert full == 1.0
    assert local == pytest.approx(cheap)
    trainer.train()
    for row in train_rows(tmp_path):
        parts = (row["task_loss"], row["kl_loss"], row["cost_loss"], row["hold_loss"])
        assert row["loss"] == pytest.approx(sum(parts), rel=1e-4)
        below = max(0.0, 1 - (2 * row["projected_cost"] - local) / 0.6) ** 2
        weight = 3.0 if row["step"] > 4 else 0.0
        assert row["hold_loss"] == pytest.approx(weight * below, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("routed", [0, 1])
def test_what_is_held_is_of_the_layers_with_a_choice_also_where_tokens_pass_blocks_by(
    routed, tmp_path
):
    """A block that half of the tokens pass by costs half, whether it has a choice or not."""
    layers = [["full"], ["full"]]
    layers[routed] = ["full", "local"]
    model = build_model(layer_experts=layers, depth_capacity=0.5, depth_layers=[0], **HARD)
    target = (0.45, 0.9)[routed]
    options = {"cost_weight": 0.1, "target_cost": target, "hold": 3.0, "max_steps": 2}
    build_trainer(tmp_path, model, **options).train()
    for row in train_rows(tmp_path):
        below = max(0.0, 1 - row[f"layer_{routed}/projected_cost"] / target) ** 2
        assert row["hold_loss"] == pytest.approx(3.0 * below, rel=1e-3, abs=1e-6)
    assert train_rows(tmp_path)[0]["hold_loss"] > 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hold": -0.5}, "hold must be >= 0, got -0.5"),
        ({"hold": math.nan}, "hold must be >= 0, got nan"),
        ({"argmax_from": 1.5}, "argmax_from must be a share of training, got 1.5"),
        ({"argmax_from": -0.1}, "argmax_from must be a share of training, got -0.1"),
    ],
    ids=str,
)
def test_what_holds_and_ends_routes_is_refused_out_of_range(tmp_path, options, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        build_trainer(tmp_path, build_model(**HARD), target_cost=0.6, **options)
    with pytest.raises(ConfigError, match=f"^{message}$"):
        build_settings("demo", options)


def test_a_loss_that_is_asked_for_outside_of_training_leaves_the_config_alone(tmp_path):
    trainer = build_trainer(tmp_path, build_model(**HARD), argmax_from=0.5)
    batch = {name: value.unsqueeze(0) for name, value in blocks()[0].items()}
    trainer.compute_loss(trainer.model, batch)
    assert trainer.model.config.training_weights == "one_hot"
    trainer.train()
    trainer.compute_loss(trainer.model, batch)
    assert trainer.model.config.training_weights == "one_hot"


def test_a_config_is_only_written_to_where_routes_shall_no_longer_be_drawn(tmp_path):
    class Change(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.model.config.training_weights = "sample"

    trainer = build_trainer(tmp_path, build_model(**HARD), callbacks=[Change()])
    trainer.train()
    assert trainer.model.config.training_weights == "sample"


def test_routes_are_no_longer_drawn_near_the_end_and_the_saved_config_is_that_of_the_run(tmp_path):
    seen = []

    class Look(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            seen.append(trainer.model.config.training_weights)

        on_step_end = on_substep_end

    trainer = build_trainer(
        tmp_path, build_model(**HARD), callbacks=[Look()], argmax_from=0.5, max_steps=4
    )
    trainer.train()
    assert seen == ["one_hot", "one_hot", "mean", "mean"]
    # and what training leaves is what it was given
    assert trainer.model.config.training_weights == "one_hot"
    trainer.save_model(str(tmp_path / "model"))
    saved = MetaAttentionConfig.from_pretrained(tmp_path / "model")
    assert saved.training_weights == "one_hot"


def test_only_models_that_were_pressed_and_cost_what_they_may_compete(tmp_path):
    trainer = build_trainer(
        tmp_path,
        build_model(**HARD),
        max_steps=11,
        target_cost=0.5,
        kl_weight=Schedule(0.0, 0.1, 0.2, 0.5),
    )
    trainer.state.global_step = 4
    assert not trainer.may_be_best({"eval_routed_cost": 0.4})
    trainer.state.global_step = 5
    assert trainer.may_be_best({"eval_routed_cost": 0.4})
    assert trainer.may_be_best({"eval_routed_cost": 0.54})
    assert not trainer.may_be_best({"eval_routed_cost": 0.56})
    plain = build_trainer(tmp_path)
    assert plain.may_be_best({})
    # a KL that ends where it began has not pressed before it has begun
    kl_weight = Schedule.parse("0->0.1->0@0.2:0.4:0.6")
    peaked = build_trainer(tmp_path, max_steps=11, kl_weight=kl_weight)
    assert not peaked.may_be_best({})
    peaked.state.global_step = 6
    assert peaked.may_be_best({})


def test_evaluation_says_what_hard_routes_cost(tmp_path):
    layers = [["full", "linear", "local"], ["local"]]
    model = build_model(layer_experts=layers, **HARD)
    metrics = build_trainer(tmp_path, model, valid=blocks()).evaluate()
    assert metrics["eval_routed_cost"] == pytest.approx(metrics["eval_layer_0/projected_cost"])
    assert metrics["eval_routed_cost"] > metrics["eval_projected_cost"]
    assert "eval_routed_cost" not in build_trainer(tmp_path, valid=blocks()).evaluate()


@pytest.mark.parametrize("routing", ["top_k", "threshold"])
def test_depth_is_part_of_the_loss_and_the_log_says_who_enters(routing, tmp_path):
    model = build_model(depth_capacity=0.3, depth_routing=routing, depth_weight=0.5)
    trainer = build_trainer(tmp_path, model, valid=blocks(), max_steps=2, eval_strategy="steps")
    trainer.args.eval_steps = 2
    trainer.train()
    rows = read_metrics(tmp_path)
    for row in rows:
        if row["kind"] == "train":
            parts = row["task_loss"] + row["kl_loss"] + row["cost_loss"] + 0.5 * row["depth_loss"]
            assert row["loss"] == pytest.approx(parts, abs=2e-4)
            assert row["depth_loss"] > 0
            if routing == "top_k":
                assert row["layer_1/entered"] == pytest.approx(10 / 32)
        name = "layer_1/entered" if row["kind"] == "train" else "eval_layer_1/entered"
        assert 0 <= row[name] < 1
        assert name.replace("1", "0") not in row
    assert {row["kind"] for row in rows} == {"train", "eval"}


def test_rates_of_state_spaces_do_not_decay(tmp_path):
    """Nor do biases; everything else of the expert does."""
    model = build_model(experts=("full", "ssm"), expert_costs="flops")
    trainer = build_trainer(tmp_path, model, weight_decay=0.1, learning_rate=0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    decayed = set(trainer.get_decay_parameter_names(model))
    own = {name for name in before if ".experts.1." in name}
    assert len(own) == 2 * 4
    assert {name for name in own if name in decayed} == {n for n in own if "step_proj" in n}
    trainer.train()
    for name in own:
        assert not torch.equal(model.get_parameter(name), before[name]), name


def test_queries_of_attention_residuals_do_not_decay(tmp_path):
    """Zero is the plain sum, not the absence of something; trained from there, they move."""
    model = build_model(residual="attention")
    trainer = build_trainer(tmp_path, model, weight_decay=0.1, learning_rate=0.01)
    decayed = trainer.get_decay_parameter_names(model)
    assert decayed
    assert not any("residuals" in name for name in decayed)
    trainer.train()
    moved = model.model.residuals.queries.abs().sum(dim=1)
    # the first reads the embedding and has nothing to choose
    assert moved[0] == 0.0
    assert (moved[1:] > 0.0).all()
