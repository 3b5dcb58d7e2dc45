"""Medusa heads: each guesses one token further ahead from the target's last hidden state.

Owns the architecture (Cai et al., 2024; FasterDecoding/Medusa) in the form whose heads are a
residual block each and share the target's lm_head, which their authors trained first and
text-generation-inference serves as version 2. It must not know losses, text or files.

Head i reads the final hidden state of token t, from which the target itself predicts t + 1, and
predicts token t + 2 + i. The heads do not see each other's guesses.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax

from checkpoints.recipe.model import ModelConfig, matmul


@dataclass(frozen=True)
class MedusaConfig:
    target: ModelConfig
    steps: int = 4  # heads
    fast_matmul: bool = False

    @property
    def vocab(self) -> int:
        return self.target.vocab


class Block(nn.Module):
    """x + silu(W x + b); W starts at zero, so a new head says what the target says."""

    fast: bool

    @nn.compact
    def __call__(self, x_BQD):
        D = x_BQD.shape[-1]
        kernel = self.param("kernel", nn.initializers.zeros, (D, D))
        bias = self.param("bias", nn.initializers.zeros, (D,))
        return x_BQD + jax.nn.silu(matmul(x_BQD, kernel, self.fast) + bias)


class MedusaHeads(nn.Module):
    config: MedusaConfig

    @nn.compact
    def __call__(self, hidden_BQD, embedding_VD):
        """Draft logits, float32[B, Q, V] per head."""
        fast = self.config.fast_matmul
        heads = [Block(fast, name=f"head_{i}")(hidden_BQD) for i in range(self.config.steps)]
        return [matmul(x_BQD, embedding_VD.T, fast) for x_BQD in heads]
