"""The denoiser. B batch, T text tokens, L image tokens, d width, N blocks, H heads of size D.

Both streams lie in one array of R rows, the texts of all samples first, then their images: what is
element-wise runs once over all of them, the matrix products once for each stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hopper.attention import Samples, attend, flash_attention, join, needs_lengths
from hopper.linear import Linear, Rows, linear
from hopper.ops import norm_modulate, place_heads, quantize_rows
from hopper.replay import Replayed
from runtimes import EngineError

ROPE_THETA = 10000.0  # diffusers' QwenImageTransformer2DModel has it as a literal
# Texts are padded to multiples: cuBLAS takes rows' scales at addresses that are multiples of 16,
# and fewer lengths are recorded.
TEXT_MULTIPLE = 16
TEXT_PARTS = 8  # a batch's texts are computed in whole such parts, of at least TEXT_MULTIPLE rows
# Tokens of text in the calls that warm up: another kernel multiplies each of these numbers of rows,
# and of more (kernels/few_rows.py).
WARM_UP = (64, 128, 192, 256)
SHIFT_1, SCALE_1, GATE_1, SHIFT_2, SCALE_2, GATE_2 = range(6)  # parts of a block's modulation
LARGEST = 448.0  # of E4M3
HEADROOM = 2.0  # of the attention's values, over the largest that calibration saw


class Pair(NamedTuple):
    """The layers of one kind of a block, for text and image."""

    text: Linear
    image: Linear

    def __call__(self, make: Callable[[slice, bool], Rows], text_rows: int, rows: int) -> Tensor:
        """BF16 [rows, out] of what `make` gives for some rows, quantized or not."""
        weight = self.image.weight
        out = torch.empty(rows, len(weight), dtype=torch.bfloat16, device=weight.device)
        text, image = self._inputs(make, text_rows)
        self.text.into(text, out[:text_rows])
        self.image.into(image, out[text_rows:])
        return out

    def _inputs(self, make: Callable[[slice, bool], Rows], text_rows: int) -> list[Rows]:
        parts = slice(0, text_rows), slice(text_rows, None)
        if self.text.fp8 != self.image.fp8:
            return [make(parts[0], self.text.fp8), make(parts[1], self.image.fp8)]
        values, scales = make(slice(None), self.text.fp8)
        return [(values[part], None if scales is None else scales[part]) for part in parts]


class Block(NamedTuple):
    norms: Tensor  # of queries and keys, BF16 [2, 2, D]: text and image, query and key
    qkv: Pair
    out: Pair
    mlp_in: Pair
    mlp_out: Pair
    # FP32 [1]: for attention in E4M3, by what values are multiplied, and its inverse.
    v_scale: Tensor | None
    v_descale: Tensor | None


class Tokens(NamedTuple):
    """What all blocks share of the rows."""

    text_rows: int
    places: Tensor  # INT32 [R], in the attention
    taken: Tensor  # the same, but −1 for padding
    samples: Samples
    cos: Tensor  # FP32 [R, D/2]
    sin: Tensor
    table: Tensor  # modulations, BF16 [B, N + 1, 2, 6d]; the last one is `final_modulation`
    index: Tensor  # INT32 [R], where in the table each row's first block begins


class Dit:
    """One prediction of the velocity."""

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """config: the transformer's, as in the checkpoint.

        Raises:
            EngineError: the attention is in E4M3, and nothing here computes that.
        """
        self.axes, size = config["axes_dims_rope"], config["attention_head_dim"]
        self.img_in, self.txt_in = linear(weights, "img_in"), linear(weights, "txt_in")
        self.txt_norm, self.proj_out = weights["txt_norm.weight"], linear(weights, "proj_out")
        self.blocks = []
        for i in range(config["num_layers"]):
            prefix = f"transformer_blocks.{i}"
            qkv, out, mlp_in, mlp_out = (
                Pair(*(linear(weights, f"{prefix}.{stream}.{kind}") for stream in Pair._fields))
                for kind in ("qkv", "out", "mlp_in", "mlp_out")
            )
            norms = weights[f"{prefix}.norms.weight"].view(2, 2, size)
            largest = weights.get(f"{prefix}.attention.largest_value")
            scales = (None, None)
            if largest is not None:
                scales = (LARGEST / (HEADROOM * largest), HEADROOM * largest / LARGEST)
            self.blocks.append(Block(norms, qkv, out, mlp_in, mlp_out, *scales))
        device = self.txt_norm.device
        in_fp8 = any(block.v_scale is not None for block in self.blocks)
        if in_fp8 and device.type == "cuda" and flash_attention() is None:
            raise EngineError(
                "FP8 attention needs FlashAttention-3, which cannot be imported: `pip install "
                "fa3-fwd`, or export without it"
            )
        self.needs_lengths = needs_lengths(device)
        # KiB, which torch reads at a process's first product. With a workspace cuBLAS takes kernels
        # that are slower for an image's rows, and clears a counter before each of them.
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
        self.replayed = Replayed(self.predict)

    def __call__(
        self,
        hidden_states: Tensor,  # BF16 [B, L, 64]
        encoder_hidden_states: Tensor,  # BF16 [B, T, text width]
        text_mask: Tensor,  # BOOL [B, T], on the host: elsewhere it is waited for
        position_ids: Tensor,  # INT32 [B, T + L, 3]
        block_modulation: Tensor,  # BF16 [B, N, 2, 6d], of the image, then of the text
        final_modulation: Tensor,  # BF16 [B, 2d]
    ) -> Tensor:  # BF16 [B, L, 64]
        """Padded text is attended to by nothing, and mostly not computed.

        Raises:
            EngineError: the inputs differ in their numbers of tokens.
        """
        text_tokens, image_tokens = text_mask.shape[1], hidden_states.shape[1]
        found = encoder_hidden_states.shape[1], position_ids.shape[1]
        if found != (text_tokens, text_tokens + image_tokens):
            raise EngineError(
                f"encoder_hidden_states and position_ids are for {found[0]} and {found[1]} tokens; "
                f"with {text_tokens} in text_mask and {image_tokens} in hidden_states they must be "
                f"for {text_tokens} and {text_tokens + image_tokens}"
            )
        counts = text_mask.sum(1).tolist()
        padding = -text_tokens % TEXT_MULTIPLE
        if padding:
            encoder_hidden_states = functional.pad(encoder_hidden_states, (0, 0, 0, padding))
            text_mask = functional.pad(text_mask, (0, padding))
            text, image = position_ids.split([text_tokens, image_tokens], 1)
            position_ids = torch.cat([functional.pad(text, (0, 0, 0, padding)), image], 1)
        given = (
            hidden_states,
            encoder_hidden_states,
            text_mask.to(hidden_states.device, non_blocking=True),
            position_ids,
            block_modulation,
            final_modulation,
        )
        text_rows = rows_for(sum(counts), text_mask.numel())
        lengths = tuple(count + image_tokens for count in counts) if self.needs_lengths else ()
        return self.replayed(*given, rest=(text_rows, lengths))

    def warm_up(self, device: torch.device) -> None:
        """Small predictions: what is compiled or loaded for them serves all sizes."""
        width, image_tokens = self.img_in.weight.shape[0], TEXT_MULTIPLE
        for text_tokens in WARM_UP:
            self(
                torch.zeros(1, image_tokens, self.img_in.weight.shape[1], device=device).bfloat16(),
                torch.zeros(1, text_tokens, self.txt_in.weight.shape[1], device=device).bfloat16(),
                torch.ones(1, text_tokens, dtype=torch.bool),
                torch.zeros(1, text_tokens + image_tokens, 3, dtype=torch.int32, device=device),
                torch.zeros(1, len(self.blocks), 2, 6 * width, device=device).bfloat16(),
                torch.zeros(1, 2 * width, device=device).bfloat16(),
            )

    def predict(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        text_mask: Tensor,
        position_ids: Tensor,
        block_modulation: Tensor,
        final_modulation: Tensor,
        text_rows: int,
        lengths: tuple[int, ...],
    ) -> Tensor:
        """The same for texts of a multiple's length. text_rows: as `join` has it. lengths: for
        `Samples`."""
        batch, text_tokens = text_mask.shape
        image_tokens = hidden_states.shape[1]
        rows, valid, places, ends = join(text_mask, image_tokens, text_rows)
        taken = places.clone()
        taken[:text_rows].masked_fill_(~valid, -1)
        text_ids, image_ids = position_ids.split([text_tokens, image_tokens], 1)
        tokens = Tokens(
            text_rows,
            places,
            taken,
            Samples(ends, text_tokens + image_tokens, lengths),
            *self.rotation(torch.cat([text_ids.flatten(0, 1)[rows], image_ids.flatten(0, 1)])),
            *self.modulations(
                block_modulation, final_modulation, rows // text_tokens, image_tokens
            ),
        )
        # Whatever lies in the padding, it must be finite: see `join`.
        text = torch.where(valid[:, None], encoder_hidden_states.flatten(0, 1)[rows], 0)
        text = functional.rms_norm(text, self.txt_norm.shape, self.txt_norm, 1e-6)
        x = torch.cat([self.txt_in(text), self.img_in(hidden_states).flatten(0, 1)])
        y = None  # what the last MLP adds to x; the next norm does it
        for i, block in enumerate(self.blocks):
            y = self.block(block, i, x, y, tokens)
        image = slice(tokens.text_rows, None)
        x, _ = normed(x, y, tokens, image, False, GATE_2, SHIFT_1, SCALE_1, len(self.blocks))
        return self.proj_out(x).view(batch, image_tokens, -1)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows' rotary angles, FP32 [R, D/2]. positions: INT32 [R, 3]."""
        angles = torch.cat(
            [
                positions[:, i : i + 1].float() * frequencies(size, positions.device)
                for i, size in enumerate(self.axes)
            ],
            dim=1,
        )
        return angles.cos(), angles.sin()

    def modulations(
        self, blocks: Tensor, final: Tensor, texts: Tensor, image_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """`Tokens.table` and `Tokens.index`. texts: INT64 [text rows], the sample of each."""
        table = functional.pad(blocks, (0, 0, 0, 0, 0, 1))
        scale, shift = final.chunk(2, dim=1)
        table[:, -1, 0, : 2 * shift.shape[1]] = torch.cat([shift, scale], 1)
        samples = torch.arange(len(table), device=table.device) * table[0].numel()
        index = torch.cat(
            [samples[texts] + table.shape[-1], samples.repeat_interleave(image_tokens)]
        )
        return table, index.int()

    def block(self, block: Block, i: int, x: Tensor, y: Tensor | None, tokens: Tokens) -> Tensor:
        """Changes `x` in place; returns what is still to be added to it, before its gate."""
        rows, text_rows = len(x), tokens.text_rows

        def attention_input(part: slice, fp8: bool) -> Rows:
            return normed(x, y, tokens, part, fp8, GATE_2, SHIFT_1, SCALE_1, i)

        qkv = block.qkv(attention_input, text_rows, rows)
        heads = (qkv, block.norms, tokens.cos, tokens.sin, tokens.places, text_rows)
        mixed = attend(*place_heads(*heads, block.v_scale), tokens.samples, block.v_descale)

        def attention_output(part: slice, fp8: bool) -> Rows:
            return gathered(mixed, tokens.taken[part], fp8)

        y = block.out(attention_output, text_rows, rows)

        def mlp_input(part: slice, fp8: bool) -> Rows:
            return normed(x, y, tokens, part, fp8, GATE_1, SHIFT_2, SCALE_2, i)

        middle = block.mlp_in(mlp_input, text_rows, rows)

        def activated(part: slice, fp8: bool) -> Rows:
            if fp8:
                return quantize_rows(middle[part], gelu=True)
            return functional.gelu(middle[part], approximate="tanh"), None

        return block.mlp_out(activated, text_rows, rows)


def normed(
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
    """The attention's rows in the order of the streams again, noughts for padding."""
    if fp8:
        return quantize_rows(x, slots=slots)
    return torch.where(slots[:, None] >= 0, x[slots.clamp_min(0)], 0), None


def rows_for(valid: int, most: int) -> int:
    """How many rows of text are computed for `valid` of `most`: few different numbers, since each
    is recorded, and multiples of TEXT_MULTIPLE."""
    part = TEXT_MULTIPLE * max(1, -(-most // (TEXT_MULTIPLE * TEXT_PARTS)))
    return min(part * max(1, -(-valid // part)), most)


def frequencies(size: int, device: torch.device) -> Tensor:
    """Of a rotary axis with `size` of a head's elements, FP32 [size/2]."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return 1.0 / torch.pow(ROPE_THETA, exponents)
