"""Forward pass of the hybrid architecture in plain NumPy: what a checkpoint means, one sequence at a time.

For small models and tests. Weights are the stored ones widened to float32, all arithmetic is float32, and the
gated delta rule is the recurrence itself, token by token. Shapes in the comments: T tokens, H hidden, V
vocabulary rows, D head size; N and K are query and key-value heads of full attention, Hk and Hv key and value
heads of a Gated-DeltaNet layer.

    model = Reference.load(directory)
    hidden, logits = model.forward([3, 14, 15])       # [T, H] after the final norm, [T, V]
    drafts = model.draft([3, 14, 15, 92], hidden, 3)  # three tokens that the MTP head proposes after 92
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperqwen.errors import VerificationError
from hyperqwen.prepare import quantize, tensors

Floats = NDArray[np.float32]

_L2_EPSILON = np.float32(1e-6)
"""Added to the squared length when queries and keys of the delta rule are normalised."""


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x), through tanh so that no x overflows."""
    result: Floats = np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1))
    return result


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Floats) -> Floats:
    """log(1 + e^x)."""
    result: Floats = np.logaddexp(x, np.float32(0))
    return result


def rms(x: Floats, epsilon: float) -> Floats:
    """x scaled to root mean square 1 along the last axis."""
    result: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return result


def softmax(x: Floats) -> Floats:
    """Along the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Floats = e / e.sum(axis=-1, keepdims=True)
    return result


def rotate(x: Floats, positions: NDArray[np.int64], theta: float, size: int) -> Floats:
    """Rotary embedding of the first `size` of D dimensions of x [T, heads, D]; pairs are (i, i + size /
    2)."""
    half = size // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = positions[:, None] * frequencies
    cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    first, second, rest = x[..., :half], x[..., half:size], x[..., size:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def causal_convolution(x: Floats, kernel: Floats) -> Floats:
    """Each channel of x [T, C] with its own kernel [C, taps]: the last tap meets the present token."""
    taps = kernel.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), np.float32), x])
    result: Floats = sum((padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(taps)), start=np.zeros_like(x))
    return result


def delta_rule(q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats) -> Floats:
    """The gated delta rule from an empty state.

    q, k [T, heads, Dk] of length 1, q also divided by sqrt(Dk); v [T, heads, Dv]; decay and beta [T, heads]
    in (0, 1]. Per token: the state [heads, Dk, Dv] decays, forgets what it holds under k, learns v there, and
    is read with q. Returns [T, heads, Dv].
    """
    steps, heads, width = v.shape
    state = np.zeros((heads, k.shape[2], width), np.float32)
    out = np.empty_like(v)
    for t in range(steps):
        state *= decay[t][:, None, None]
        held = np.einsum("hkv,hk->hv", state, k[t])
        state += k[t][:, :, None] * (beta[t][:, None] * (v[t] - held))[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out


@dataclass(frozen=True)
class Reference:
    """A checkpoint in memory: its text configuration and its weights as float32."""

    config: Mapping[str, Any]
    weights: Mapping[str, Floats]

    @classmethod
    def load(cls, directory: Path) -> Reference:
        """Read config.json and model.safetensors. Raises VerificationError where they are not such a
        model's."""
        config = json.loads((directory / "config.json").read_text())
        stored = tensors.read(directory / "model.safetensors")
        weights: dict[str, Floats] = {}
        for name, array in stored.items():
            if name.endswith(".weight_packed"):
                scale = stored[name.removesuffix("packed") + "scale"]
                weights[name.removesuffix("_packed")] = quantize.dequantize(array, scale)
            elif not name.endswith((".weight_scale", ".weight_shape")):
                weights[name] = tensors.as_float(array)
        model_type = config.get("model_type")
        if model_type != "qwen3_5_text":
            raise VerificationError(f"{directory}/config.json: model_type is {model_type!r}, this reads 'qwen3_5_text'")
        return cls(config, weights)

    def forward(self, ids: Sequence[int]) -> tuple[Floats, Floats]:
        """Hidden states [T, H] after the final norm, and logits [T, V], of a sequence from position 0."""
        x = self.weights["model.embed_tokens.weight"][list(ids)]
        for index, kind in enumerate(self.config["layer_types"]):
            x = self._block(x, f"model.layers.{index}.", kind)
        hidden = self._norm(x, "model.norm")
        return hidden, self.logits(hidden)

    def logits(self, hidden: Floats) -> Floats:
        """[T, V] from hidden states [T, H]."""
        result: Floats = hidden @ self.weights["lm_head.weight"].T
        return result

    def draft(self, ids: Sequence[int], hidden: Floats, count: int) -> list[int]:
        """Greedy proposals of the MTP head after `ids` [T], given the target's hidden states of all but the
        last id.

        The head sees, at each position, the *next* token's embedding and the hidden state there; a further
        proposal takes the head's own output for the hidden state that the target has not computed yet. As an
        engine does it, the positions are those of the hidden states.
        """
        states = hidden[: len(ids) - 1]
        tokens = list(ids)
        for _ in range(count):
            out = self.mtp(tokens[1:], states)
            tokens.append(int(self.logits(out[-1:])[0].argmax()))
            states = np.concatenate([states, out[-1:]])
        return tokens[len(ids) :]

    def mtp(self, next_ids: Sequence[int], hidden: Floats) -> Floats:
        """Output [T, H] of the MTP head for next tokens [T] and hidden states [T, H], positions from 0."""
        embedding = self._norm(self.weights["model.embed_tokens.weight"][list(next_ids)], "mtp.pre_fc_norm_embedding")
        x = self._linear(np.concatenate([embedding, self._norm(hidden, "mtp.pre_fc_norm_hidden")], axis=-1), "mtp.fc")
        return self._norm(self._block(x, "mtp.layers.0.", "full_attention"), "mtp.norm")

    def _block(self, x: Floats, prefix: str, kind: str) -> Floats:
        mixer = {"linear_attention": self._gated_delta_net, "full_attention": self._attention}[kind]
        x = x + mixer(self._norm(x, prefix + "input_layernorm"), prefix)
        y = self._norm(x, prefix + "post_attention_layernorm")
        gate, up = (self._linear(y, prefix + f"mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._linear(silu(gate) * up, prefix + "mlp.down_proj")

    def _attention(self, x: Floats, prefix: str) -> Floats:
        """Causal attention with an output gate; q_proj holds query and gate side by side per head."""
        c = self.config
        steps, size = len(x), c["head_dim"]
        heads, shared = c["num_attention_heads"], c["num_key_value_heads"]
        prefix += "self_attn."
        q, gate = np.split(self._linear(x, prefix + "q_proj").reshape(steps, heads, 2 * size), 2, axis=-1)  # [T, N, D]
        k = self._linear(x, prefix + "k_proj").reshape(steps, shared, size)  # [T, K, D]
        v = self._linear(x, prefix + "v_proj").reshape(steps, shared, size)
        rope = c["rope_parameters"]
        turned = int(size * rope["partial_rotary_factor"])
        positions = np.arange(steps)
        q = rotate(self._norm(q, prefix + "q_norm"), positions, rope["rope_theta"], turned)
        k = rotate(self._norm(k, prefix + "k_norm"), positions, rope["rope_theta"], turned)
        k, v = (np.repeat(a, heads // shared, axis=1) for a in (k, v))
        scores = np.einsum("tnd,snd->nts", q, k) / np.float32(np.sqrt(size))
        scores = np.where(np.tri(steps, dtype=bool), scores, np.float32(-np.inf))
        mixed = np.einsum("nts,snd->tnd", softmax(scores), v) * sigmoid(gate)
        return self._linear(mixed.reshape(steps, heads * size), prefix + "o_proj")

    def _gated_delta_net(self, x: Floats, prefix: str) -> Floats:
        c = self.config
        steps = len(x)
        key_heads, value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        key_size, value_size = c["linear_key_head_dim"], c["linear_value_head_dim"]
        prefix += "linear_attn."
        kernel = self.weights[prefix + "conv1d.weight"][:, 0]
        qkv = silu(causal_convolution(self._linear(x, prefix + "in_proj_qkv"), kernel))
        keys = key_heads * key_size
        q, k = (part.reshape(steps, key_heads, key_size) for part in (qkv[:, :keys], qkv[:, keys : 2 * keys]))
        v = qkv[:, 2 * keys :].reshape(steps, value_heads, value_size)
        q, k = (a / np.sqrt((a * a).sum(axis=-1, keepdims=True) + _L2_EPSILON) for a in (q, k))
        q, k = (np.repeat(a, value_heads // key_heads, axis=1) for a in (q, k))  # [T, Hv, Dk]
        beta = sigmoid(self._linear(x, prefix + "in_proj_b"))
        rate = softplus(self._linear(x, prefix + "in_proj_a") + self.weights[prefix + "dt_bias"])
        decay = np.exp(-np.exp(self.weights[prefix + "A_log"]) * rate)
        out = delta_rule(q / np.float32(np.sqrt(key_size)), k, v, decay, beta)
        z = self._linear(x, prefix + "in_proj_z").reshape(steps, value_heads, value_size)
        # Unlike every other norm here, this one's weight is the factor itself and not its distance from 1.
        out = rms(out, c["rms_norm_eps"]) * self.weights[prefix + "norm.weight"] * silu(z)
        return self._linear(out.reshape(steps, value_heads * value_size), prefix + "out_proj")

    def _linear(self, x: Floats, name: str) -> Floats:
        result: Floats = x @ self.weights[name + ".weight"].T
        return result

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms(x, self.config["rms_norm_eps"]) * (np.float32(1) + self.weights[name + ".weight"])
