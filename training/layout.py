"""The files of a checkpoint in diffusers layout that hold no weights.

Shared by the trained checkpoint (`training`) and the random ones of the tests
(`tests.make_checkpoint`): the tokenizer in Qwen2 format, the text encoder's config and the
scheduler of the published 20B checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import Qwen2_5_VLConfig, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

# What QwenImagePipeline puts before and after a prompt, and how many tokens of the prefix it drops.
TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n"
)
TEMPLATE_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
DROPPED_TOKENS = 34

# Qwen2's added tokens in their order; the last eight are not "special" there.
ADDED_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
NOT_SPECIAL = ADDED_TOKENS[14:]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------- tokenizer


def byte_symbols(text: str) -> str:
    """The text as byte-level BPE sees it: one printable symbol for each UTF-8 byte."""
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def split_words(text: str) -> list[str]:
    """The text's words as Qwen2 splits it, before BPE, without special tokens."""
    split = Sequence(
        [
            Split(Regex(r"<\|\w+\|>"), behavior="removed"),
            Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
        ]
    )
    return [piece for piece, _ in split.pre_tokenize_str(text)]


def learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Merges that turn each word (in byte symbols) into one token.

    Each word in turn is split by the merges so far, and its first two pieces are merged until one
    is left. A merge added later has the lowest rank, so it cannot break a word learnt earlier.
    """
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        pieces = list(word)
        while len(pieces) > 1:
            pairs = list(pairwise(pieces))
            known = [ranks[pair] for pair in pairs if pair in ranks]
            if known:
                best = min(known)
                at = next(i for i, pair in enumerate(pairs) if ranks.get(pair) == best)
            else:
                at = 0
                ranks[pairs[0]] = len(ranks)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return list(ranks)


def write_tokenizer(folder: Path, words: Iterable[str]) -> None:
    """Writes the five files of the published tokenizer folders.

    The template's words and `words` (as text) become one token each. A word of characters beyond
    ASCII has to be one that may stand anywhere within a run of such characters.
    """
    folder.mkdir(parents=True)
    symbols_of_words = map(byte_symbols, [*split_words(TEMPLATE_PREFIX + "assistant\n"), *words])
    merges = learn_merges(dict.fromkeys(symbols_of_words))
    symbols = sorted(ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    vocab = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}
    added = {token: len(vocab) + i for i, token in enumerate(ADDED_TOKENS)}
    special = [token for token in ADDED_TOKENS if token not in NOT_SPECIAL]

    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    write_json(folder / "vocab.json", vocab)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(folder / "added_tokens.json", added)
    write_json(
        folder / "special_tokens_map.json",
        {
            "additional_special_tokens": special[1:],
            "eos_token": {"content": "<|im_end|>", **flags},
            "pad_token": {"content": "<|endoftext|>", **flags},
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(i): {"content": token, **flags, "special": token in special}
                for token, i in added.items()
            },
            "additional_special_tokens": special[1:],
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "extra_special_tokens": {},
            "model_max_length": 131072,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )


def load_tokenizer(folder: Path) -> Qwen2Tokenizer:
    """The tokenizer in `folder`, checked to split the template as the pipeline expects."""
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    count = len(tokenizer(TEMPLATE_PREFIX).input_ids)
    if count != DROPPED_TOKENS:
        raise AssertionError(f"the template is {count} tokens long instead of {DROPPED_TOKENS}")
    return tokenizer


# ------------------------------------------------------------------------------------ configs


def text_encoder_config(
    tokenizer: Qwen2Tokenizer,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool = False,
    initializer_range: float = 0.02,
) -> Qwen2_5_VLConfig:
    """A small Qwen2.5-VL with the smallest vision tower; `tied`: output and input table are one."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ADDED_TOKENS}
    half = width // heads // 2
    # Of the frequency pairs of a head the real model gives 16, 24 and 24 of 64 to time, height
    # and width.
    time = max(half // 4, 1)
    height = (half - time) // 2
    text_config = {
        # Rounded up, as the real table is longer than the vocabulary.
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128000,
        "max_window_layers": layers,
        "rms_norm_eps": 1e-6,
        "initializer_range": initializer_range,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [time, height, half - time - height],
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": tied,
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    return Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=tied,
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of the published 20B checkpoints."""
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        num_train_timesteps=1000,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )
