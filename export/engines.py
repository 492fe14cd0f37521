"""The four engines: their borders, and how their parts are put together."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from export import parts
from export.checkpoint import Checkpoint
from export.graph import Part, Tensor

FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
BOOL, UINT8 = ir.DataType.BOOL, ir.DataType.UINT8


@dataclass(frozen=True)
class Engine:
    """`prologue`, then `blocks` copies of `block`, then `epilogue`.

    `blocks_prefix` is where the checkpoint keeps the blocks: `<prefix>.<i>.<name>`. The output
    `collected`, where there is one, is that of all the blocks joined on axis 1.
    """

    name: str
    component: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    prologue: Part
    block: Part | None = None
    epilogue: Part | None = None
    blocks: int = 0
    blocks_prefix: str = ""
    collected: str | None = None

    @property
    def stages(self) -> list[tuple[str, Part]]:
        """(name of the stage, its part) in order: `prologue`, `block.0` …, `epilogue`."""
        result = [("prologue", self.prologue)]
        if self.block:
            result += [(f"block.{i}", self.block) for i in range(self.blocks)]
        if self.epilogue:
            result.append(("epilogue", self.epilogue))
        return result

    def weight_name(self, stage: str, parameter: str) -> str:
        """The checkpoint's name of a part's parameter."""
        if parameter.startswith("block."):
            return f"{self.blocks_prefix}.{stage.split('.')[1]}.{parameter.removeprefix('block.')}"
        return parameter

    def value_name(self, stage: str, output: str) -> str:
        """The graph's name of a stage's output."""
        border = any(tensor.name == output for tensor in self.outputs)
        return output if border and output != self.collected else f"{stage}.{output}"


def engines(checkpoint: Checkpoint) -> list[Engine]:
    return [build(checkpoint) for build in (text_encoder, modulation, dit, vae_decoder)]


def text_encoder(checkpoint: Checkpoint) -> Engine:
    model, config = checkpoint.language_model, checkpoint.text_config
    width, heads = config.hidden_size, config.num_attention_heads
    frequencies = Qwen2_5_VLRotaryEmbedding(config).inv_freq

    input_ids = Tensor("input_ids", INT64, ("batch", "tokens"))
    hidden = Tensor("hidden", FLOAT, ("batch", "tokens", width))
    shared = (
        Tensor("cos", FLOAT, (1, "tokens", width // heads)),
        Tensor("sin", FLOAT, (1, "tokens", width // heads)),
    )
    return Engine(
        name="text_encoder",
        component="text_encoder",
        inputs=(input_ids,),
        outputs=(Tensor("hidden_states", FLOAT, ("batch", "prompt_tokens", width)),),
        prologue=Part(
            parts.TextPrologue(model, frequencies),
            (input_ids,),
            ("hidden", "cos", "sin"),
        ),
        block=Part(parts.TextBlock(model.layers[0]), (hidden, *shared), ("hidden",)),
        epilogue=Part(
            parts.TextEpilogue(model, checkpoint.dropped_tokens), (hidden,), ("hidden_states",)
        ),
        blocks=config.num_hidden_layers,
        blocks_prefix="layers",
    )


def modulation(checkpoint: Checkpoint) -> Engine:
    model = checkpoint.transformer
    width, blocks = model.inner_dim, model.config.num_layers
    timestep = Tensor("timestep", FLOAT, ("batch", 1))
    embedding = Tensor("embedding", FLOAT, ("batch", width))
    return Engine(
        name="modulation",
        component="transformer",
        inputs=(timestep,),
        outputs=(
            Tensor("block_modulation", FLOAT, ("batch", blocks, 2, 6 * width)),
            Tensor("final_modulation", FLOAT, ("batch", 2 * width)),
        ),
        prologue=Part(parts.ModulationPrologue(model), (timestep,), ("embedding",)),
        block=Part(
            parts.ModulationBlock(model.transformer_blocks[0]),
            (embedding,),
            ("block_modulation",),
        ),
        epilogue=Part(parts.ModulationEpilogue(model), (embedding,), ("final_modulation",)),
        blocks=blocks,
        blocks_prefix="transformer_blocks",
        collected="block_modulation",
    )


def dit(checkpoint: Checkpoint) -> Engine:
    model = checkpoint.transformer
    config, width, blocks = model.config, model.inner_dim, model.config.num_layers
    inputs = (
        Tensor("hidden_states", FLOAT, ("batch", "image_tokens", config.in_channels)),
        Tensor(
            "encoder_hidden_states", FLOAT, ("batch", "text_tokens", config.joint_attention_dim)
        ),
        Tensor("text_mask", BOOL, ("batch", "text_tokens")),
        Tensor("position_ids", INT32, ("batch", "all_tokens", 3)),
        Tensor("block_modulation", FLOAT, ("batch", blocks, 2, 6 * width)),
        Tensor("final_modulation", FLOAT, ("batch", 2 * width)),
    )
    image = Tensor("image", FLOAT, ("batch", "image_tokens", width))
    half = config.attention_head_dim // 2
    block_inputs = (
        image,
        Tensor("text", FLOAT, ("batch", "text_tokens", width)),
        Tensor("bias", FLOAT, ("batch", 1, "all_tokens", "all_tokens")),
        Tensor("cos", FLOAT, ("batch", "all_tokens", half)),
        Tensor("sin", FLOAT, ("batch", "all_tokens", half)),
        inputs[4],
        Tensor("index", INT64, (1,)),
    )
    out_channels = config.patch_size**2 * model.out_channels
    return Engine(
        name="dit",
        component="transformer",
        inputs=inputs,
        outputs=(Tensor("noise_pred", FLOAT, ("batch", "image_tokens", out_channels)),),
        prologue=Part(
            parts.DitPrologue(model), inputs[:4], ("image", "text", "bias", "cos", "sin")
        ),
        block=Part(parts.DitBlock(model.transformer_blocks[0]), block_inputs, ("image", "text")),
        epilogue=Part(parts.DitEpilogue(model), (image, inputs[5]), ("noise_pred",)),
        blocks=blocks,
        blocks_prefix="transformer_blocks",
    )


def vae_decoder(checkpoint: Checkpoint) -> Engine:
    latents = Tensor("latents", FLOAT, ("batch", checkpoint.vae.config.z_dim, "height", "width"))
    pixels = Tensor("pixels", UINT8, ("batch", "pixel_height", "pixel_width", 3))
    return Engine(
        name="vae_decoder",
        component="vae",
        inputs=(latents,),
        outputs=(pixels,),
        prologue=Part(parts.VaeDecoder(checkpoint.vae), (latents,), ("pixels",)),
    )
