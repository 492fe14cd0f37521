"""Full-size Qwen-Image with random weights, made on the GPU: the stock modules in BF16, and the
engines for Hopper from the same weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from torch import Tensor, nn
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from export.recipe import load_recipe
from hopper import dit as hopper_dit
from hopper.dit import Dit
from hopper.layout import layout
from hopper.modulation import Modulation
from hopper.ops import quantize_rows
from quality.served import position_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The published configs, as far as they differ from the classes' defaults.
TEXT_CONFIG = Qwen2_5_VLTextConfig(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=128000,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    attn_implementation="sdpa",
)
TEXT = {
    "num_hidden_layers": TEXT_CONFIG.num_hidden_layers,
    "num_attention_heads": TEXT_CONFIG.num_attention_heads,
    "num_key_value_heads": TEXT_CONFIG.num_key_value_heads,
    "rms_norm_eps": TEXT_CONFIG.rms_norm_eps,
    "rope_theta": 1e6,
    "dropped_tokens": 34,  # of the prompt's template
}
TRANSFORMER: dict[str, Any] = {
    "num_layers": 60,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
# Of which the forward pass is told:
DIT_CONFIG = {
    name: TRANSFORMER[name] for name in ("num_layers", "attention_head_dim", "axes_dims_rope")
}
VAE: dict[str, Any] = {"base_dim": 96}
VAE_CONFIG: dict[str, Any] = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
TEXT_TOKENS = 128
MODULATION = re.compile(r"(time_text_embed|norm_out)\.|.*\.(img|txt)_mod\.")

# (pattern of a tensor's name, mean, gain): a vector has the standard deviation `gain`, a matrix
# gain/√fan-in; the first match counts. Every block adds much to the residual stream: with torch's
# own initialization gates and modulation are close to 0, and errors hardly show.
GAINS: list[tuple[str, float, float]] = [
    (r"timestep_embedder\.linear_[12]\.weight", 0.0, 2.0),
    (r"attn\.to_(add_)?out.*weight", 0.0, 2.5),
    (r"_mod\.1\.weight|norm_out\.linear\.weight", 0.0, 0.3),
    (r"_mod\.1\.bias", 0.15, 0.1),
    (r"(norm[^.]*|layernorm)\.(weight|gamma)$|gamma$", 1.0, 0.2),
    (r"embed_tokens\.weight", 0.0, 60.0),
    (r"\.bias$", 0.0, 0.2),
    (r"", 0.0, 1.0),
]


Inputs = dict[str, Tensor]


def random_module(build: Callable[[], Any], seed: int) -> Any:
    """A module with weights by `GAINS`, BF16 on the GPU."""
    with torch.device("meta"):
        module = build().eval().requires_grad_(False)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    state = {
        name: random_tensor(name, value.shape, generator)
        for name, value in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    return module


def random_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    mean, gain = next((m, g) for pattern, m, g in GAINS if re.search(pattern, name))
    fan_in = shape[1:].numel() if len(shape) > 1 and not name.endswith("gamma") else 1
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    return tensor.normal_(mean, gain / fan_in**0.5, generator=generator)


def transformer(initialized: bool) -> Any:
    """initialized: by torch's own rules instead of `GAINS`."""
    if initialized:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(DEVICE):
            module = QwenImageTransformer2DModel(**TRANSFORMER).eval().requires_grad_(False)
        torch.set_default_dtype(default)
    else:
        module = random_module(lambda: QwenImageTransformer2DModel(**TRANSFORMER), 1)
    # Its rotary table is no buffer, so that it stayed where the module was made.
    module.pos_embed = QwenImageTransformer2DModel(**TRANSFORMER | {"num_layers": 0}).pos_embed
    return module


def vae() -> Any:
    return random_module(lambda: AutoencoderKLQwenImage(**VAE), 2)


def language_model() -> Any:
    module = random_module(lambda: Qwen2_5_VLTextModel(TEXT_CONFIG), 3)
    with torch.device(DEVICE):
        module.rotary_emb = type(module.rotary_emb)(TEXT_CONFIG)
    return module


def packed(engine: str, module: nn.Module, fp8: Callable[[str], bool]) -> dict[str, Tensor]:
    """The engine's tensors as the export lays them out, quantized where `fp8` says so of a
    layer's name; what is not quantized or joined shares the module's memory."""
    state: Mapping[str, Tensor] = module.state_dict()
    result = {}
    for name, sources in layout(engine, belonging(engine, state)).items():
        parts = [single_frame(state[source]) for source in sources]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if name.endswith(".weight") and tensor.ndim == 2 and fp8(sources[0]):
            result[name], result[name.replace(".weight", ".scale")] = quantize_rows(tensor)
        else:
            result[name] = tensor
    return result


def belonging(engine: str, names: Iterable[str]) -> list[str]:
    """Those of a module's tensors that the engine holds."""
    if engine == "vae_decoder":
        return [
            name
            for name in names
            if name.startswith(("decoder.", "post_quant_conv.")) and "time_conv" not in name
        ]
    if engine == "modulation":
        return [name for name in names if MODULATION.match(name)]
    if engine == "dit":
        return [name for name in names if not MODULATION.match(name)]
    return list(names)


def single_frame(tensor: Tensor) -> Tensor:
    """Of a causal convolution the last tap in time; norms' weights are flat."""
    if tensor.ndim == 5:
        tensor = tensor[:, :, -1]
    return tensor if tensor.ndim < 3 or tensor.shape[1:].numel() > 1 else tensor.squeeze()


def in_fp8(recipe: str, engine: str = "dit") -> Callable[[str], bool]:
    """Whether a recipe has a layer of the DiT, or of the text encoder, in FP8."""
    with torch.device("meta"):
        module, blocks = (
            (QwenImageTransformer2DModel(**TRANSFORMER), TRANSFORMER["num_layers"])
            if engine == "dit"
            else (Qwen2_5_VLTextModel(TEXT_CONFIG), TEXT_CONFIG.num_hidden_layers)
        )
    linear = [name for name, each in module.named_modules() if isinstance(each, nn.Linear)]
    formats = load_recipe(recipe)[engine].assign(belonging(engine, linear), blocks)
    return lambda weight: formats.get(weight.removesuffix(".weight")) == "fp8"


def edges(recipe: str) -> set[int]:
    """The blocks that a recipe of the DiT leaves alone."""
    return load_recipe(recipe)["dit"].edges(TRANSFORMER["num_layers"])


def fp8_blocks(layer: str) -> bool:
    """The layers that the benchmark quantizes: all of the blocks'."""
    return layer.startswith(("transformer_blocks.", "layers."))


def no_fp8(_: str) -> bool:
    return False


class Models:
    """The stock transformer and the engines made of it."""

    def __init__(self, initialized: bool = False, quantized: Callable[[str], bool] = fp8_blocks):
        self.stock = transformer(initialized)
        self.quantize(quantized)
        weights = packed("modulation", self.stock, no_fp8)
        self.modulation = Modulation(weights, DIT_CONFIG)

    def quantize(self, quantized: Callable[[str], bool]) -> None:
        """Makes the DiT anew, with other layers in FP8."""
        self.weights = packed("dit", self.stock, quantized)
        self.dit = Dit(self.weights, DIT_CONFIG)

    def inputs(
        self, batch: int, height: int, width: int, sigma: float = 0.6, valid: Any = None
    ) -> Inputs:
        """Random ones; valid: text tokens of each row, all by default."""
        generator = torch.Generator(DEVICE).manual_seed(batch * height + width)
        counts = torch.tensor(valid or [TEXT_TOKENS] * batch)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()

        timestep = torch.full((batch, 1), sigma, device=DEVICE).bfloat16().float()
        blocks, final = self.modulation(timestep)
        positions = torch.from_numpy(position_ids(TEXT_TOKENS, height, width))
        return {
            "hidden_states": normal(batch, height * width, 64),
            "encoder_hidden_states": normal(batch, TEXT_TOKENS, TEXT_CONFIG.hidden_size),
            "text_mask": torch.arange(TEXT_TOKENS) < counts[:, None],
            "position_ids": positions.to(DEVICE).repeat(batch, 1, 1),
            "block_modulation": blocks,
            "final_modulation": final,
        }

    def expected(self, inputs: Inputs, height: int, width: int, sigma: float) -> Tensor:
        """The stock module's prediction."""
        batch = len(inputs["hidden_states"])
        return stock_step(self.stock, inputs, [[(1, height, width)]] * batch, sigma)

    def use_fp8_attention(self, but: Collection[int] = ()) -> None:
        """Takes the values' scales from one prediction, then uses it in all blocks but some."""
        largest: list[Tensor] = []
        attend = hopper_dit.attend

        def recorded(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
            largest.append(v.abs().max().float().view(1))
            return attend(q, k, v, *arguments)

        hopper_dit.attend = recorded
        Dit(self.weights, DIT_CONFIG)(**self.inputs(2, 64, 64))  # its first call is not a replay
        hopper_dit.attend = attend
        for i, value in enumerate(largest):
            if i not in but:
                self.weights[f"transformer_blocks.{i}.attention.largest_value"] = value
        self.dit = Dit(self.weights, DIT_CONFIG)


def stock_step(stock: Any, inputs: Inputs, shapes: Any, sigma: float) -> Tensor:
    mask = inputs["text_mask"]
    prediction: Tensor = stock(
        hidden_states=inputs["hidden_states"],
        encoder_hidden_states=inputs["encoder_hidden_states"],
        encoder_hidden_states_mask=None if mask.all() else mask.to(DEVICE),
        timestep=torch.full((len(mask),), sigma, device=DEVICE).bfloat16(),
        img_shapes=shapes,
        return_dict=False,
    )[0]
    return prediction
