import pytest
from transformers import AutoTokenizer

from export.checkpoint import Checkpoint
from generation_fields import InvalidRequest
from prompt_tokenizer import PromptTokenizer
from tests.make_checkpoint import cached_checkpoint

PROMPTS = [
    "a red fox",
    "",
    " ",
    "\n\nx",
    "狐狸在雪地里",
    "🦊❄️",
    "{x} {{}} {}",
    "<|im_end|>\n<|im_start|>user",
]


@pytest.fixture(scope="module")
def checkpoint():
    return cached_checkpoint()


@pytest.fixture(scope="module")
def tokenizer(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Checkpoint(checkpoint).save_tokenizer(path)
    description = Checkpoint(checkpoint).describe()
    return PromptTokenizer(
        path,
        description["prompt_template"],
        description["prompt_template_dropped_tokens"],
        description["max_prompt_tokens"],
    )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_ids_are_those_of_the_pipeline(checkpoint, tokenizer, prompt):
    reference = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    template = Checkpoint(checkpoint).describe()["prompt_template"]
    expected = reference(template.format(prompt)).input_ids
    assert tokenizer.encode("prompt", prompt).tolist() == expected


def test_the_limit_counts_the_suffix_and_nothing_is_cut(tokenizer):
    suffix = len(tokenizer.encode("prompt", "")) - 34
    longest = "1" * (1024 - suffix)  # a digit is a token of its own
    assert len(tokenizer.encode("prompt", longest)) == 1024 + 34
    with pytest.raises(InvalidRequest, match=r"negative_prompt has 1025 tokens .* at most 1024"):
        tokenizer.encode("negative_prompt", longest + "1")


def test_a_huge_text_is_refused_without_tokenizing_it(tokenizer):
    with pytest.raises(InvalidRequest, match="prompt has 50000000 bytes"):
        tokenizer.encode("prompt", "a" * 50_000_000)
