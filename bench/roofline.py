"""How long a step and a picture take at least, and what memory they need, from shapes alone.

    python -m bench.roofline

Every piece of work takes the longer of its arithmetic and its traffic. `ROOF` are an H200's
ceilings, measured one by one in a cool moment; `H200` is what it keeps up for seconds, where its
power limit counts, and predicts times. Other cards get their data sheet's rates, cut by what the
H200 keeps up of its own, and their times are marked as computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

D = 3072  # the DiT's width
BLOCKS = 60
TEXT_WIDTH, TEXT_LAYERS, TEXT_KV_WIDTH, TEXT_MLP, VOCABULARY = 3584, 28, 512, 18944, 152064
BYTES = {"fp8": 1, "bf16": 2}


@dataclass(frozen=True)
class Card:
    """Ceilings in TFLOP/s (dense) and TB/s, memory in GB. `measured`: on the card itself.

    kernel: microseconds that each kernel takes besides, for its start and its last, partly idle
    wave.
    """

    name: str
    fp8: float
    bf16: float
    attention_bf16: float
    attention_fp8: float
    bandwidth: float
    memory: float
    kernel: float = 6
    measured: bool = False


# Measured on one H200 SXM: `docs/hopper.md`.
ROOF = Card("H200, each ceiling alone", 1523, 792, 768, 898, 4.18, 141, kernel=0, measured=True)
H200 = Card("H200", 1500, 720, 620, 750, 3.4, 141, measured=True)


def from_data_sheet(name: str, fp8: float, bf16: float, bandwidth: float, memory: float) -> Card:
    """A card that reaches of its data sheet's rates what the H200 reaches of its own: 1979, 989,
    4.8. Attention is taken as the same part of the matrix rate."""
    fp8, bf16 = fp8 * H200.fp8 / 1979, bf16 * H200.bf16 / 989
    return Card(
        name,
        round(fp8),
        round(bf16),
        round(bf16 * H200.attention_bf16 / H200.bf16),
        round(fp8 * H200.attention_fp8 / H200.fp8),
        round(bandwidth * H200.bandwidth / 4.8, 2),
        memory,
    )


# NVIDIA's data sheets and architecture papers, dense rates with FP32 accumulation.
CARDS = [
    H200,
    from_data_sheet("H100 SXM", 1979, 989, 3.35, 80),
    from_data_sheet("B200", 4500, 2250, 7.7, 180),
    from_data_sheet("B300", 4500, 2250, 8.0, 288),
    from_data_sheet("RTX PRO 6000 Blackwell", 1007, 503, 1.79, 96),
    from_data_sheet("RTX 5090", 419, 209, 1.79, 32),
    from_data_sheet("RTX 4090", 330, 165, 1.01, 24),
]


class Piece(NamedTuple):
    """Arithmetic at one of a card's rates, and traffic; both overlap."""

    what: str
    tflop: float
    rate: str
    terabytes: float
    kernels: int = 1

    def seconds(self, card: Card) -> float:
        rate: float = getattr(card, self.rate)
        busy = max(self.tflop / rate, self.terabytes / card.bandwidth)
        return busy + self.kernels * card.kernel * 1e-6


class Work(NamedTuple):
    pieces: list[Piece]

    def seconds(self, card: Card) -> float:
        return sum(piece.seconds(card) for piece in self.pieces)

    def times(self, count: int) -> Work:
        return Work(
            [
                Piece(
                    piece.what,
                    piece.tflop * count,
                    piece.rate,
                    piece.terabytes * count,
                    piece.kernels * count,
                )
                for piece in self.pieces
            ]
        )


def product(what: str, rows: int, width: int, out: int, precision: str) -> Piece:
    """A matrix product with a weight [out, width]; its result is BF16."""
    traffic = BYTES[precision] * (rows * width + out * width) + 2 * rows * out
    return Piece(what, 2e-12 * rows * width * out, precision, 1e-12 * traffic)


def dit_work(
    batch: int,
    image_tokens: int,
    text_tokens: int,
    precision: str,
    fp8_attention: bool,
    bf16_blocks: int = 0,
) -> Work:
    """One prediction of the DiT; guided, a step is a batch of two. bf16_blocks: those that stay."""
    block = block_work(batch, image_tokens, text_tokens, precision, fp8_attention)
    wide = block_work(batch, image_tokens, text_tokens, "bf16", False)
    return Work(block.times(BLOCKS - bf16_blocks).pieces + wide.times(bf16_blocks).pieces)


def block_work(
    batch: int, image_tokens: int, text_tokens: int, precision: str, fp8_attention: bool
) -> Work:
    tokens, kind = image_tokens + text_tokens, "fp8" if fp8_attention else "bf16"
    rows, size = batch * tokens, BYTES[precision]
    attention = 4e-12 * batch * tokens**2 * D
    # Bytes a row and unit of width. Twice residual, LayerNorm and modulation (read two, write two);
    # heads into their places; GELU of four widths; the attention's output into its streams.
    norms, heads, gelu = 2 * (2 + 2 + 2 + size), 6 + 3 * BYTES[kind], 4 * (2 + size)
    gather = BYTES[kind] + size
    elementwise = 1e-12 * rows * D * (norms + heads + gelu + gather)
    block = [
        product(stream, batch * count, width, out, precision)
        for stream, count in (("text", text_tokens), ("image", image_tokens))
        for width, out in ((D, 3 * D), (D, D), (D, 4 * D), (4 * D, D))
    ]
    block.append(
        Piece("attention", attention, f"attention_{kind}", 1e-12 * rows * D * 4 * BYTES[kind])
    )
    block.append(Piece("element-wise", 0.0, precision, elementwise, kernels=5))
    return Work(block)


def text_encoder_work(tokens: int, precision: str) -> Work:
    """One prompt through the language model."""
    shapes = (
        (TEXT_WIDTH, TEXT_WIDTH + 2 * TEXT_KV_WIDTH),
        (TEXT_WIDTH, TEXT_WIDTH),
        (TEXT_WIDTH, 2 * TEXT_MLP),
        (TEXT_MLP, TEXT_WIDTH),
    )
    layer = [product("text encoder", tokens, width, out, precision) for width, out in shapes]
    return Work(layer).times(TEXT_LAYERS)


def modulation_work(timesteps: int) -> Work:
    """The modulations of a whole schedule."""
    block = [product("modulation", timesteps, D, 12 * D, "bf16")]
    return Work(block).times(BLOCKS)


def vae_decoder_work(pixels: int) -> Work:
    """One picture; its convolutions are 3×3 but for shortcuts, which are left out."""
    convolutions = {  # number of weights by the pixels of one result: 1/64 of the picture's …
        64: 9 * (16 * 384 + (4 + 6) * 384**2),
        16: 9 * (384 * 192 + 192 * 384 + 5 * 384**2),
        4: 9 * (384 * 192 + 6 * 192**2),
        1: 9 * (192 * 96 + 6 * 96**2 + 96 * 3),
    }
    widths = {64: 384 * 10, 16: 384 * 6, 4: 192 * 6, 1: 96 * 6}  # of what the levels write
    tflop = sum(2e-12 * pixels / part * count for part, count in convolutions.items())
    # Each result is written, normed (read, written) and read again.
    traffic = sum(8e-12 * pixels / part * width for part, width in widths.items())
    attention = Piece("VAE attention", 4e-12 * (pixels / 64) ** 2 * 384, "attention_bf16", 0.0)
    return Work([Piece("VAE", tflop, "bf16", traffic), attention])


def picture_work(
    height: int, width: int, steps: int, guided: bool, precision: str, fp8_attention: bool
) -> Work:
    """A prompt of 128 tokens (guided: and a short negative one) to pixels."""
    batch = 2 if guided else 1
    step = dit_work(batch, height * width // 256, 128, precision, fp8_attention)
    return Work(
        [
            *text_encoder_work(128, precision).times(batch).pieces,
            *modulation_work(steps).pieces,
            *step.times(steps).pieces,
            *vae_decoder_work(height * width).pieces,
        ]
    )


def memory_gb(precision: str, tokens: int) -> float:
    """Weights of all engines, and the largest call's activations: `tokens` rows in the MLP.

    The modulation's are BF16, and 13.6 GB of the sum: they may stay on the host.
    """
    size = BYTES[precision]
    dit = BLOCKS * 2 * 12 * D**2 * size
    text = TEXT_LAYERS * TEXT_WIDTH * (2 * TEXT_WIDTH + 2 * TEXT_KV_WIDTH + 3 * TEXT_MLP) * size
    embeddings, modulation = 2 * VOCABULARY * TEXT_WIDTH, 2 * BLOCKS * 12 * D**2
    activations = tokens * D * (2 * (1 + 1 + 3 + 3 + 4) + size * 4)
    return (dit + text + embeddings + modulation + activations) / 1e9


def main() -> None:
    print("| card | precision | guided step, 1024² | 50 steps, 1024² | memory | |")
    print("|---|---|---:|---:|---:|---|")
    for card in CARDS:
        for precision, fp8_attention in (("bf16", False), ("fp8", False), ("fp8", True)):
            step = dit_work(2, 4096, 128, precision, fp8_attention).seconds(card)
            picture = picture_work(1024, 1024, 50, True, precision, fp8_attention).seconds(card)
            memory = memory_gb(precision, 2 * 4224)
            kind = "ceilings measured" if card.measured else "computed"
            fits = "" if memory < card.memory else ", does not fit at once"
            name = f"{precision}{', FP8 attention' if fp8_attention else ''}"
            print(
                f"| {card.name} | {name} | {step * 1e3:.0f} ms | {picture:.2f} s | "
                f"{memory:.0f} GB | {kind}{fits} |"
            )


if __name__ == "__main__":
    main()
