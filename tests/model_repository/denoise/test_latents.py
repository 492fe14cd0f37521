import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from diffusers.utils.torch_utils import randn_tensor

from latents import initial_noise, pack, position_ids, unpack


def test_noise_is_what_diffusers_draws_for_a_list_of_generators():
    seeds = [3, 4, 2**63 - 1]
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    drawn = randn_tensor((3, 1, 16, 6, 10), generator=generators, dtype=torch.float32)
    expected = QwenImagePipeline._pack_latents(drawn, 3, 16, 6, 10)
    assert torch.equal(initial_noise(seeds, 16, 6, 10), expected)


def test_pack_and_unpack_are_diffusers():
    latents = torch.randn(2, 16, 6, 10)
    packed = pack(latents)
    assert torch.equal(packed, QwenImagePipeline._pack_latents(latents, 2, 16, 6, 10))
    assert torch.equal(unpack(packed, 6, 10), latents)
    reference = QwenImagePipeline._unpack_latents(packed, 48, 80, 8)[:, :, 0]
    assert torch.equal(unpack(packed, 6, 10), reference)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 4), (3, 8), (7, 5), (1, 6)])
def test_positions_select_the_frequencies_of_diffusers(rows, columns):
    axes, text_tokens = [4, 6, 6], 9
    rope = QwenEmbedRope(theta=10000, axes_dim=axes, scale_rope=True)
    image, text = rope([(1, rows, columns)], max_txt_seq_len=text_tokens)
    ids = position_ids(text_tokens, rows, columns)
    assert ids.dtype == torch.int32
    angles = torch.cat(
        [
            ids[:, axis : axis + 1].float()
            / torch.pow(10000, torch.arange(0, dim, 2).float() / dim)
            for axis, dim in enumerate(axes)
        ],
        dim=1,
    )
    expected = torch.cat([text, image])
    assert torch.allclose(torch.polar(torch.ones_like(angles), angles), expected, atol=1e-6)
