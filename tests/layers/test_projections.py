"""The short convolution: what it is, and what it does not see."""

import pytest
import torch

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.layers.projections import ShortConvolution
from meta_attention.testing import assert_within_error_budget


def make_conv(channels=6, width=3) -> ShortConvolution:
    torch.manual_seed(0)
    conv = ShortConvolution(channels, width).double()
    torch.nn.init.normal_(conv.weight)
    return conv


@pytest.mark.parametrize("width", [1, 2, 5])
def test_it_is_a_depthwise_causal_convolution(width):
    conv, x = make_conv(width=width), torch.randn(2, 9, 6, dtype=torch.float64)
    # taps of PyTorch's count from the oldest
    kernel = conv.weight.flip(1).unsqueeze(1)
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), kernel, padding=width - 1, groups=6)[
        ..., :9
    ]
    torch.testing.assert_close(conv(x)[0], expected.transpose(1, 2))


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [1, 5, 3]], ids=str)
def test_parts_are_as_the_whole(sizes):
    conv, x = make_conv(width=4), torch.randn(2, 9, 6, dtype=torch.float64)
    past, parts = None, []
    for part in x.split(sizes, dim=1):
        out, past = conv(part, past)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), conv(x)[0])
    assert torch.equal(past, x[:, -3:])


def test_documents_do_not_see_each_other():
    conv, x = make_conv(width=4), torch.randn(1, 9, 6, dtype=torch.float64)
    documents = torch.tensor([[1, 1, 2, 3, 3, 3, 3, 3, 0]])
    alone = [conv(part)[0] for part in x.split([2, 1, 5, 1], dim=1)]
    torch.testing.assert_close(conv(x, None, documents)[0], torch.cat(alone, dim=1))


def test_half_precision_stays_what_it_is_and_is_close():
    conv, x = make_conv(), torch.randn(2, 9, 6, dtype=torch.float64).bfloat16()
    oracle = conv(x.double())[0]
    plain = sum(
        torch.nn.functional.pad(x, (0, 0, i, 0))[:, :9] * conv.weight[:, i].bfloat16()
        for i in range(3)
    )
    out, past = conv.float()(x)
    assert out.dtype == past.dtype == torch.bfloat16
    assert_within_error_budget("convolved", out, oracle, plain)


@pytest.mark.parametrize(
    ("width", "taps"), [(1, [1.0]), (2, [0.6, 0.4]), (4, [0.6, 0.4, 0.0, 0.0])]
)
def test_a_new_model_looks_one_token_back_in_every_channel(width, taps):
    config = MetaAttentionConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, short_conv=width
    )
    conv = MetaAttentionForCausalLM(config).model.layers[0].attention.projections[0].short_conv
    torch.testing.assert_close(conv.weight, torch.tensor(taps).expand(3 * 16, width))


def test_a_loaded_one_is_as_it_was_saved(tmp_path):
    config = MetaAttentionConfig(
        vocab_size=11,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        short_conv=3,
    )
    model = MetaAttentionForCausalLM(config)
    weight = model.model.layers[0].attention.projections[0].short_conv.weight
    torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    loaded = MetaAttentionForCausalLM.from_pretrained(tmp_path)
    again = loaded.model.layers[0].attention.projections[0].short_conv.weight
    assert torch.equal(weight, again)
