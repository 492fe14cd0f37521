"""Prompt text → token ids, as the pipeline's template and tokenizer make them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from generation_fields import InvalidRequest

# No token of Qwen2's vocabulary is longer than this many bytes, so that a longer text cannot fit
# and need not be tokenized to find out.
_MAX_BYTES_PER_TOKEN = 256


class PromptTokenizer:
    """Puts a prompt into the checkpoint's template and tokenizes it."""

    def __init__(
        self, tokenizer_json: Path, template: str, dropped_tokens: int, max_prompt_tokens: int
    ) -> None:
        """
        Args:
            tokenizer_json: the checkpoint's tokenizer in the format of the `tokenizers` library.
            template: holds one `{}` where the prompt goes.
            dropped_tokens: how many leading tokens the model drops after encoding.
            max_prompt_tokens: limit for the rest: the prompt and the template's suffix.
        """
        self._tokenizer = Tokenizer.from_file(str(tokenizer_json))
        self._prefix, self._suffix = template.split("{}")
        self._dropped_tokens = dropped_tokens
        self._max_prompt_tokens = max_prompt_tokens

    def encode(self, field: str, text: str) -> NDArray[np.int64]:
        """Returns the ids [S] of the whole template with `text` in it.

        Raises:
            InvalidRequest: more than `max_prompt_tokens` after the dropped ones.
        """
        size = len(text.encode("utf-8"))
        if size > self._max_prompt_tokens * _MAX_BYTES_PER_TOKEN:
            raise InvalidRequest(
                f"{field} has {size} bytes, which is beyond the limit of "
                f"{self._max_prompt_tokens} tokens; shorten it"
            )
        encoding = self._tokenizer.encode(self._prefix + text + self._suffix)
        count = len(encoding.ids) - self._dropped_tokens
        if count > self._max_prompt_tokens:
            raise InvalidRequest(
                f"{field} has {count} tokens with the template's suffix; "
                f"at most {self._max_prompt_tokens} are allowed"
            )
        return np.array(encoding.ids, dtype=np.int64)
