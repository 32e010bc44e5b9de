"""The model `random`: a small Llama with random weights, made here. Nothing is downloaded.

What it says means nothing; everything else about it is real. Its weights are a pure function of `_SEED`, the
same bytes with every version of numpy. They are scaled so that attention matters (a wrong KV cache gives
another text) and that the text is printable ASCII that seldom ends by itself. Under greedy decoding the best
logit leads by 2 in the median and by 0.03 in all but one step of a hundred, and float32 is off by 0.00005 at
most: that makes "the same tokens" a fair test. With bfloat16 one step in fifty goes another way.

numpy, safetensors and tokenizers are imported when a model is made, never before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.core.errors import UsageError
from dynamo_local.model.cache import (
    CACHE_DIR_ENV,
    CACHE_REMEDY,
    default_cache_root,
    make_models_folder,
    temporary_cache_root,
    written_whole,
)

if TYPE_CHECKING:
    import numpy as np
    import tokenizers
    from numpy.typing import NDArray

_FORMAT = 1
"""Part of the cache key: raise it when the files change for a reason that `_recipe` does not show."""
_SEED = 2
_HIDDEN, _INTERMEDIATE, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 256, 512, 4, 4, 2, 64
_BYTES = 256
_BOS, _EOS, _PAD = "<s>", "</s>", "<pad>"
_ROLES = ("system", "user", "assistant", "tool")
_SPECIAL = (_BOS, _EOS, _PAD, *(f"<|{role}|>" for role in _ROLES))
_VOCABULARY = _BYTES + len(_SPECIAL)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "<|{{ role }}|>{{ message['content'] or '' }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": _BYTES + _SPECIAL.index(_BOS),
    "eos_token_id": _BYTES + _SPECIAL.index(_EOS),
    "pad_token_id": _BYTES + _SPECIAL.index(_PAD),
    "dtype": "float32",
}

_SCALE = {
    "embed": 1.0,
    "q": 0.1,  # attention logits spread by about 2.5: each head looks at few positions, whose content decides
    "k": 0.1,
    "v": 1 / 16,  # attention and MLP each add to the residual stream about what the embedding put there
    "o": 1 / 16,
    "gate": 1 / 16,
    "up": 1 / 16,
    "down": 0.074,
    "lm_head": 0.5,  # logits spread by about 8
}
"""Standard deviation of each kind of weight. 1/16 is 1/sqrt(hidden size): output as large as the input."""
_LIKELY, _POSSIBLE = "abcdefghijklmnopqrstuvwxyz ", 0.6
_UNLIKELY = 0.3
"""Letters and the space compete at full scale, other printable ASCII at 0.6, all else at 0.3."""


def random_model(cache_root: Path | None = None) -> Path:
    """Folder of the model, made at the first call and the same ever after. Safe with concurrent callers.

    `cache_root` defaults to $DYN_LOCAL_CACHE_DIR, else ~/.cache/dynamo-local, and where that cannot be written, to a
    folder among the temporary files: 10 MB. Raises UsageError when the folder cannot be written or a library is
    missing.
    """
    root = cache_root or default_cache_root()
    try:
        return _made(root)
    except OSError as error:
        if cache_root is None and not os.environ.get(CACHE_DIR_ENV):
            return _made_temporarily()
        raise _unwritable(root, error) from error


def _made_temporarily() -> Path:
    root = temporary_cache_root()
    try:
        return _made(root)
    except OSError as error:
        raise _unwritable(root, error) from error


def _unwritable(root: Path, error: OSError) -> UsageError:
    return UsageError(f"the model 'random' cannot be written to {root} ({error.strerror})", CACHE_REMEDY)


def _made(root: Path) -> Path:
    """Raises OSError when the folder cannot be written, UsageError when a library is missing."""
    folder = root / "models" / f"random-{_recipe_digest()}"
    if folder.is_dir():
        return folder
    make_models_folder(root)
    try:
        _make(folder)
    except ImportError as error:
        raise UsageError(
            f"the model 'random' cannot be made without the library {error.name!r}",
            "install the CPU set-up: pip install 'dynamo-local[cpu]'",
        ) from error
    return folder


def _recipe_digest() -> str:
    recipe = [_FORMAT, _SEED, _CONFIG, _SCALE, _LIKELY, _POSSIBLE, _UNLIKELY, _SPECIAL, CHAT_TEMPLATE]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def _make(folder: Path) -> None:
    with written_whole(folder) as draft:
        _write_weights(draft)
        _write_tokenizer(draft)
        _write_json(draft / "config.json", _CONFIG)
        token_ids = {name: _CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(draft / "generation_config.json", token_ids)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file(dict(_tensors()), folder / "model.safetensors", metadata={"format": "pt"})


def _tensors() -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and float32 values of each weight, by the names that Llama checkpoints use."""
    import numpy as np

    bits = np.random.PCG64(_SEED)

    def normal(scale: float, rows: int, columns: int) -> NDArray[np.float32]:
        """Near-normal values from raw bits: numpy promises these for ever, but not its distributions.

        The sum of four 16-bit uniforms has a standard deviation of 65536 / sqrt(3).
        """
        raw: NDArray[np.uint64] = bits.random_raw(rows * columns)
        lanes = raw.view(np.uint16).reshape(rows, columns, 4)
        values = lanes.sum(axis=2, dtype=np.int64) - 2 * 65535
        scaled: NDArray[np.float64] = values * (scale * 3**0.5 / 65536)
        return scaled.astype(np.float32)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    kv_size, q_size = _KV_HEADS * _HEAD_DIM, _HEADS * _HEAD_DIM
    shapes = {
        "self_attn.q_proj": ("q", q_size, _HIDDEN),
        "self_attn.k_proj": ("k", kv_size, _HIDDEN),
        "self_attn.v_proj": ("v", kv_size, _HIDDEN),
        "self_attn.o_proj": ("o", _HIDDEN, q_size),
        "mlp.gate_proj": ("gate", _INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": ("up", _INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": ("down", _HIDDEN, _INTERMEDIATE),
    }
    yield "model.embed_tokens.weight", normal(_SCALE["embed"], _VOCABULARY, _HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for name, (kind, rows, columns) in shapes.items():
            yield f"{prefix}{name}.weight", normal(_SCALE[kind], rows, columns)
        yield f"{prefix}input_layernorm.weight", ones
        yield f"{prefix}post_attention_layernorm.weight", ones
    yield "model.norm.weight", ones
    yield "lm_head.weight", normal(_SCALE["lm_head"], _VOCABULARY, _HIDDEN) * _preference()


def _preference() -> NDArray[np.float32]:
    """How strongly each token takes part in the choice of the next: one factor a row of the output layer."""
    import numpy as np

    factors = np.full((_VOCABULARY, 1), _UNLIKELY, dtype=np.float32)
    factors[32:127] = _POSSIBLE
    factors[[ord(letter) for letter in _LIKELY]] = 1.0
    return factors


def _byte_symbols() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(_BYTES) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(_BYTES + n) for n, byte in enumerate(hidden)}


def _write_tokenizer(folder: Path) -> None:
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BOS,
            "eos_token": _EOS,
            "pad_token": _PAD,
            "additional_special_tokens": [token for token in _SPECIAL if token not in (_BOS, _EOS, _PAD)],
            "model_max_length": _CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _tokenizer() -> tokenizers.Tokenizer:
    """One token a byte (its id is the byte), then the special tokens; a BOS in front of plain text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {symbol: byte for byte, symbol in _byte_symbols().items()}
    vocabulary |= {token: _BYTES + n for n, token in enumerate(_SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, vocabulary[_BOS])]
    )
    return tokenizer
