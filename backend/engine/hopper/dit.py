"""The denoiser. B batch, T text tokens, L image tokens, d width, N blocks, H heads of size D.

Both streams lie in one array of rows, the texts of all samples first, then their images: what is
element-wise runs once over all of them, the matrix products once for each stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hopper.attention import attend, join
from hopper.fp8_attention import Fp8Attention, Scales
from hopper.linear import Linear, Rows, linear
from hopper.ops import norm_modulate, place_heads, quantize_rows
from hopper.replay import Replayed

ROPE_THETA = 10000.0  # diffusers' QwenImageTransformer2DModel has it as a literal
SHIFT_1, SCALE_1, GATE_1, SHIFT_2, SCALE_2, GATE_2 = range(6)  # parts of a block's modulation


class Pair(NamedTuple):
    """The layers of one kind of a block, for text and image."""

    text: Linear
    image: Linear

    def prepare(self, make: Callable[[slice, bool], Rows], text_rows: int) -> list[Rows]:
        """Inputs of both: `make(rows, fp8)` computes them at once if the formats agree."""
        if self.text.fp8 != self.image.fp8:
            return [
                make(slice(0, text_rows), self.text.fp8),
                make(slice(text_rows, None), self.image.fp8),
            ]
        values, scales = make(slice(None), self.text.fp8)
        parts = slice(0, text_rows), slice(text_rows, None)
        return [(values[part], None if scales is None else scales[part]) for part in parts]

    def __call__(self, make: Callable[[slice, bool], Rows], text_rows: int, rows: int) -> Tensor:
        """BF16 [rows, out]."""
        weight = self.image.weight
        out = torch.empty(rows, len(weight), dtype=torch.bfloat16, device=weight.device)
        text, image = self.prepare(make, text_rows)
        self.text.into(text, out[:text_rows])
        self.image.into(image, out[text_rows:])
        return out


class Block(NamedTuple):
    norms: Tensor  # of queries and keys, BF16 [4·D]: text query, text key, image query, image key
    qkv: Pair
    out: Pair
    mlp_in: Pair
    mlp_out: Pair
    scales: Scales | None  # of its attention, where that is in E4M3


class Tokens(NamedTuple):
    """What all blocks share of the rows."""

    text_rows: int
    slots: Tensor  # INT32 [R], their places in the joint attention, −1 for none
    lengths: tuple[int, ...]  # of the samples there; empty for FP8
    real: Tensor  # the same, INT32 [B] on the device
    taken: Tensor  # INT32 [R], as `slots`, but padding takes the row of noughts behind all
    cos: Tensor  # FP32 [R, D/2]
    sin: Tensor
    table: Tensor  # modulations, BF16 [B, N + 1, 2, 6d]; the last one is `final_modulation`
    index: Tensor  # INT32 [R], where in the table each row's first block begins


class Dit:
    """One prediction of the velocity."""

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """config: the transformer's, as in the checkpoint."""
        self.axes = config["axes_dims_rope"]
        self.size = config["attention_head_dim"]
        self.img_in, self.txt_in = linear(weights, "img_in"), linear(weights, "txt_in")
        self.txt_norm, self.proj_out = weights["txt_norm.weight"], linear(weights, "proj_out")
        self.blocks = []
        for i in range(config["num_layers"]):
            prefix = f"transformer_blocks.{i}"
            qkv, out, mlp_in, mlp_out = (
                Pair(*(linear(weights, f"{prefix}.{stream}.{kind}") for stream in Pair._fields))
                for kind in ("qkv", "out", "mlp_in", "mlp_out")
            )
            amax = weights.get(f"{prefix}.attention.amax")
            scales = None if amax is None else Scales.of(amax)
            norms = weights[f"{prefix}.norms.weight"]
            self.blocks.append(Block(norms, qkv, out, mlp_in, mlp_out, scales))
        with_scales = self.blocks[0].scales is not None
        self.fp8_attention = Fp8Attention(self.txt_norm.device) if with_scales else None
        self.replayed = Replayed(self.predict)

    def __call__(
        self,
        hidden_states: Tensor,  # BF16 [B, L, 64]
        encoder_hidden_states: Tensor,  # BF16 [B, T, text width]
        text_mask: Tensor,  # BOOL [B, T]
        position_ids: Tensor,  # INT32 [B, T + L, 3]
        block_modulation: Tensor,  # BF16 [B, N, 2, 6d], of the image, then of the text
        final_modulation: Tensor,  # BF16 [B, 2d]
    ) -> Tensor:  # BF16 [B, L, 64]
        """Padded text is attended to by nothing."""
        given = (hidden_states, encoder_hidden_states, text_mask, position_ids)
        lengths: tuple[int, ...] = ()
        if self.fp8_attention is None:  # cuDNN's BF16 kernel wants them on the host
            lengths = tuple((text_mask.sum(1) + hidden_states.shape[1]).tolist())
        return self.replayed(*given, block_modulation, final_modulation, rest=(lengths,))

    def predict(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        text_mask: Tensor,
        position_ids: Tensor,
        block_modulation: Tensor,
        final_modulation: Tensor,
        lengths: tuple[int, ...],
    ) -> Tensor:
        tokens = self.describe(
            text_mask,
            position_ids,
            block_modulation,
            final_modulation,
            hidden_states.shape[1],
            lengths,
        )
        text = functional.rms_norm(encoder_hidden_states, self.txt_norm.shape, self.txt_norm, 1e-6)
        x = torch.cat([self.txt_in(text).flatten(0, 1), self.img_in(hidden_states).flatten(0, 1)])
        y = None  # what the last MLP adds to x; the next norm does it
        for i, block in enumerate(self.blocks):
            y = self.block(block, i, x, y, tokens)
        image = slice(tokens.text_rows, None)
        x, _ = self.norm(x, y, tokens, image, False, GATE_2, SHIFT_1, SCALE_1, len(self.blocks))
        return self.proj_out(x).view(len(hidden_states), -1, len(self.proj_out.weight))

    def describe(
        self,
        text_mask: Tensor,
        position_ids: Tensor,
        block_modulation: Tensor,
        final_modulation: Tensor,
        image_tokens: int,
        lengths: tuple[int, ...],
    ) -> Tokens:
        batch, text_tokens = text_mask.shape
        positions = torch.cat(
            [
                position_ids[:, :text_tokens].flatten(0, 1),
                position_ids[:, text_tokens:].flatten(0, 1),
            ]
        ).float()
        angles = torch.cat(
            [
                positions[:, i : i + 1] * frequencies(size, positions.device)
                for i, size in enumerate(self.axes)
            ],
            dim=1,
        )
        table = functional.pad(block_modulation, (0, 0, 0, 0, 0, 1))
        scale, shift = final_modulation.chunk(2, dim=1)
        table[:, -1, 0, : 2 * shift.shape[1]] = torch.cat([shift, scale], 1)
        samples = torch.arange(batch, device=text_mask.device, dtype=torch.int32) * table[0].numel()
        index = torch.cat(
            [
                samples.repeat_interleave(text_tokens) + table.shape[-1],
                samples.repeat_interleave(image_tokens),
            ]
        )
        text_rows = batch * text_tokens
        slots = join(text_mask, image_tokens, padded=not lengths)
        taken = slots.clone()
        taken[:text_rows].masked_fill_(~text_mask.flatten(), len(slots))
        real = (text_mask.sum(1) + image_tokens).int()
        cos, sin = angles.cos(), angles.sin()
        return Tokens(text_rows, slots, lengths, real, taken, cos, sin, table, index)

    def block(self, block: Block, i: int, x: Tensor, y: Tensor | None, tokens: Tokens) -> Tensor:
        """Changes `x` in place; returns what is still to be added to it, before its gate."""
        rows, text_rows = len(x), tokens.text_rows

        def normed(part: slice, fp8: bool) -> Rows:
            return self.norm(x, y, tokens, part, fp8, GATE_2, SHIFT_1, SCALE_1, i)

        qkv = block.qkv(normed, text_rows, rows)
        y = block.out(self.attention(block, qkv, tokens), text_rows, rows)

        def normed_again(part: slice, fp8: bool) -> Rows:
            return self.norm(x, y, tokens, part, fp8, GATE_1, SHIFT_2, SCALE_2, i)

        middle = block.mlp_in(normed_again, text_rows, rows)

        def activated(part: slice, fp8: bool) -> Rows:
            if fp8:
                return quantize_rows(middle[part], gelu=True)
            return functional.gelu(middle[part], approximate="tanh"), None

        return block.mlp_out(activated, text_rows, rows)

    def attention(self, block: Block, qkv: Tensor, tokens: Tokens) -> Callable[[slice, bool], Rows]:
        """Gives the attention's output in the order of the streams, noughts for padding."""
        norms = block.norms.view(2, 2, self.size)
        given = (qkv, norms, tokens.cos, tokens.sin, tokens.slots, tokens.text_rows)
        scales = block.scales
        if self.fp8_attention is None or scales is None:
            mixed = attend(*place_heads(*given), tokens.lengths)
            return lambda part, fp8: gathered(mixed, tokens.slots[part], fp8)
        heads = place_heads(*given, scales.value)
        mixed = self.fp8_attention(*heads, tokens.real, scales)
        return lambda part, fp8: gathered_e4m3(mixed, scales, tokens.taken[part], fp8)

    def norm(
        self,
        x: Tensor,
        y: Tensor | None,
        tokens: Tokens,
        part: slice,
        fp8: bool,
        gate: int,
        shift: int,
        scale: int,
        i: int,
    ) -> Rows:
        """Of some rows: adds `y` with its gate to `x`; LayerNorm and modulation by block `i`."""
        width = x.shape[1]
        block = i * 2 * 6 * width
        gate_block = block if gate == GATE_1 else block - 2 * 6 * width  # the block before
        return norm_modulate(
            x[part],
            None if y is None else y[part],
            tokens.table,
            tokens.index[part],
            gate_block + gate * width,
            block + shift * width,
            block + scale * width,
            fp8,
        )


def gathered(x: Tensor, slots: Tensor, fp8: bool) -> Rows:
    """Rows of `x` in the order of the streams again, noughts for padding."""
    if fp8:
        return quantize_rows(x, slots=slots)
    return torch.where(slots[:, None] >= 0, x[slots.clamp_min(0)], 0), None


def gathered_e4m3(x: Tensor, scales: Scales, taken: Tensor, fp8: bool) -> Rows:
    """The same of E4M3 rows with one scale; without `fp8` they become BF16."""
    values = x.view(torch.uint8).index_select(0, taken).view(x.dtype)
    if fp8:
        return values, scales.inverse_output.expand(len(taken)).contiguous()
    return (values.float() * scales.inverse_output).bfloat16(), None


def frequencies(size: int, device: torch.device) -> Tensor:
    """Of a rotary axis with `size` of a head's elements, FP32 [size/2]."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return 1.0 / torch.pow(ROPE_THETA, exponents)
