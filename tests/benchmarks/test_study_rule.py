"""Routes by a rule: full attention where the last two tokens stood together far back."""

import pytest
import torch
from study_rule import follow_rule
from study_variants import SCALES, VARIANTS, find_variant

from meta_attention import MetaAttentionForCausalLM
from meta_attention.controller import last_seen
from meta_attention.errors import ConfigError

# windows of 16 and 1, of 64 tokens
SCALE = SCALES["tiny"].with_changes(["window_size=1"])


def test_tokens_take_full_attention_where_their_run_is_beyond_the_window():
    model = MetaAttentionForCausalLM(VARIANTS["rule-wide"].model_config(SCALE, 64)).eval()
    follow_rule(model)
    # so few that many runs come again, near and far
    ids = torch.randint(8, (4, 64), generator=torch.Generator().manual_seed(0))
    out = model(ids, use_cache=False, output_routing=True)
    expert = out.routing_weights[3].argmax(dim=-1)
    distance = last_seen(ids, 2)[..., 1]
    assert torch.equal(expert == 0, distance >= 16)
    assert torch.equal(expert == 1, distance < 16)
    assert 0.05 < (expert == 0).float().mean() < 0.9


def test_nothing_of_the_rule_learns_and_nothing_presses():
    variant = find_variant("rule-wide")
    model = MetaAttentionForCausalLM(variant.model_config(SCALE, 64))
    follow_rule(model)
    attention = model.model.layers[3].attention
    for module in (attention.controller, attention.recurrence):
        assert not any(p.requires_grad for p in module.parameters())
    assert variant.is_routed
    assert variant.pressure(SCALE).end == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prior-free-wide-kv_head-0.45", "recurrence"),
        ("bayes-global-token-0.4-recurrence", "two"),
        ("prior-free-wide-kv_head-0.45-recurrence", "one route for all heads"),
    ],
)
def test_the_rule_is_refused_where_it_says_nothing(name, message):
    model = MetaAttentionForCausalLM(find_variant(name).model_config(SCALE, 64))
    with pytest.raises(ConfigError, match=message):
        follow_rule(model)
