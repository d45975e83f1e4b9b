"""lm-evaluation-harness, run as ``docs/lm_eval.md`` says, against the model called directly."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")

PAGE = (Path(__file__).parents[2] / "docs" / "lm_eval.md").read_text("utf-8")
BLOCKS = {
    kind: re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for kind in ("bash", "json", "yaml")
}
COMMAND = BLOCKS["bash"][-1].strip()

TEXTS = [{"text": "The lamp was lit before dark."}, {"text": "Ships passed, far out: \u00e9clair."}]
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/rolling.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: bits_per_byte}]
"""
GREEDY = """
task: greedy
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/greedy.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: text
doc_to_target: text
generation_kwargs: {max_gen_toks: 12, until: []}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def harness(model, tokenizer, tmp_path):
    """Run the documented command on a random checkpoint: scores of a task, and its samples."""
    model.save_pretrained(tmp_path / "runs" / "demo")
    tokenizer.save_pretrained(tmp_path / "runs" / "demo")
    (tmp_path / "tasks").mkdir()

    def run(task, yaml, lines, model_args=""):
        (tmp_path / "tasks" / f"{task}.yaml").write_text(yaml, "utf-8")
        (tmp_path / "tasks" / f"{task}.jsonl").write_text(lines, "utf-8")
        command = COMMAND.replace("--tasks capitals", f"--tasks {task}")
        command = command.replace("pretrained=runs/demo", f"pretrained=runs/demo{model_args}")
        own = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | own,
        )
        assert result.returncode == 0, result.stderr
        (scores,) = tmp_path.glob("results/*/results_*.json")
        (samples,) = tmp_path.glob("results/*/samples_*.jsonl")
        found = map(json.loads, samples.read_text("utf-8").splitlines())
        return (
            json.loads(scores.read_text("utf-8"))["results"][task],
            sorted(found, key=lambda sample: sample["doc_id"]),
        )

    return run


@torch.no_grad()
def log_likelihood(model, context: list[int], continuation: list[int]) -> float:
    """Of one row without padding, nats."""
    row = torch.tensor([context + continuation])
    log_probs = model(row).logits[0, :-1].log_softmax(-1)  # [T - 1, V]
    return log_probs.gather(-1, row[0, 1:, None])[-len(continuation) :].sum().item()


@torch.no_grad()
def continue_greedily(model, context: list[int], num_tokens: int) -> list[int]:
    """One row, computed anew for every token."""
    row = list(context)
    for _ in range(num_tokens):
        row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(context) :]


@pytest.mark.parametrize("has_boundary", [False, True])
def test_choices_score_as_the_model_called_directly(harness, model, tokenizer, has_boundary):
    (lines,), (yaml,) = BLOCKS["json"], BLOCKS["yaml"]
    flag = ",add_bos_token=True" if has_boundary else ""
    scores, samples = harness("capitals", yaml, lines, flag)

    start = [tokenizer.eos_token_id] if has_boundary else []
    hits, hits_by_length = [], []
    for line, sample in zip(map(json.loads, lines.splitlines()), samples, strict=True):
        expected = [
            log_likelihood(model, [*start, *line["question"].encode()], [*f" {choice}".encode()])
            for choice in line["choices"]
        ]
        actual = [float(value) for value, _ in sample["filtered_resps"]]
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected))
        by_length = [
            value / len(choice) for value, choice in zip(expected, line["choices"], strict=True)
        ]
        hits.append(expected.index(max(expected)) == line["answer"])
        hits_by_length.append(by_length.index(max(by_length)) == line["answer"])
    assert scores["acc,none"] == sum(hits) / len(hits)
    assert scores["acc_norm,none"] == sum(hits_by_length) / len(hits_by_length)


def test_bits_per_byte_count_from_the_document_boundary(harness, model, tokenizer):
    scores, _ = harness("rolling", ROLLING, "\n".join(map(json.dumps, TEXTS)))
    rows = [[*line["text"].encode()] for line in TEXTS]
    total = sum(log_likelihood(model, [tokenizer.eos_token_id], row) for row in rows)
    expected = -total / math.log(2) / sum(map(len, rows))
    torch.testing.assert_close(scores["bits_per_byte,none"], expected, rtol=1e-5, atol=0.0)


def test_padded_generation_with_a_cache_writes_what_each_prompt_alone_would(
    harness, model, tokenizer
):
    _, samples = harness("greedy", GREEDY, "\n".join(map(json.dumps, TEXTS)))
    for line, sample in zip(TEXTS, samples, strict=True):
        tokens = continue_greedily(model, [*line["text"].encode()], 12)
        assert sample["resps"][0][0] == tokenizer.decode(tokens, skip_special_tokens=True)
