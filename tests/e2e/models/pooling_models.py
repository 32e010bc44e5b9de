"""Tiny pooling models with random weights. Nothing is downloaded: they are made by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dynamo_local.model.named.random_model import random_model

LABELS = ("bad", "fair", "good")
_SETTINGS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    # At transformers' own (0.02) all inputs get much the same output.
    "initializer_range": 0.2,
}


def make_embedder(folder: Path) -> Path:
    """Write a BERT that embeds into `folder`, which does not exist yet. Returns it."""
    return _make(folder, "AutoModel")


def make_classifier(folder: Path, labels: tuple[str, ...] = LABELS) -> Path:
    """Write a BERT that classifies; one with a single label scores pairs of texts, as a cross-encoder."""
    return _make(folder, "AutoModelForSequenceClassification", labels)


def _make(folder: Path, kind: str, labels: tuple[str, ...] = LABELS) -> Path:
    import torch
    import transformers

    shutil.copytree(random_model(), folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(random_model() / "tokenizer_config.json", folder)
    vocabulary = json.loads((random_model() / "config.json").read_text())["vocab_size"]
    named = dict(enumerate(labels))
    config = transformers.BertConfig(**_SETTINGS, vocab_size=vocabulary, id2label=named)
    torch.manual_seed(1)
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
