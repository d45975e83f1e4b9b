"""The block: residuals around routed attention and the feed-forward."""

import torch
import torch.nn.functional as F

from meta_attention import MetaAttentionConfig, MetaTransformerBlock


def make_block() -> MetaTransformerBlock:
    config = MetaAttentionConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    return MetaTransformerBlock(config).double()


def test_block_is_two_residual_halves():
    block = make_block()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    out = block(x)
    h = x + block.attention(block.attention_norm(x)).output
    expected = h + block.mlp(block.mlp_norm(h))
    torch.testing.assert_close(out.output, expected)
    assert out.kl.shape == (2, 9)
    assert out.routes.weights.shape == (2, 9, 3)


def test_block_passes_mask_and_positions_on():
    block = make_block()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :3] = 0
    padded = block(F.pad(x, (0, 0, 3, 0)), mask)
    torch.testing.assert_close(padded.output[:, 3:], block(x).output)
    shifted = block(x, position_ids=torch.arange(20, 29)[None])
    assert not torch.allclose(shifted.routes.weights, block(x).routes.weights)


def test_a_few_steps_reduce_the_loss():
    torch.manual_seed(0)
    block = make_block().float()
    x, target = torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        out = block(x)
        loss = (out.output - target).square().mean() + 0.01 * out.kl.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
