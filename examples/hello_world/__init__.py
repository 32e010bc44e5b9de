"""The smallest graph: three services that stream words through each other, without a model."""

from __future__ import annotations
