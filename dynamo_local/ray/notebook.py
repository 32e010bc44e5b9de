"""Notes in the key-value table of Ray's head: an entry is made only if there is none of its name."""

from __future__ import annotations

from dataclasses import dataclass

from ray.experimental import internal_kv

from dynamo_local.ray.connection import ray_errors

_TABLE = "dynamo"


@dataclass(frozen=True)
class Notebook:
    """The notes of a namespace (cluster.Cluster)."""

    namespace: str

    def notes(self) -> dict[str, bytes]:
        with ray_errors("tell its notes"):
            keys = [key.decode() for key in internal_kv._internal_kv_list(self._key(""), namespace=_TABLE)]
            found = {key: internal_kv._internal_kv_get(key, namespace=_TABLE) for key in keys}
        return {key.removeprefix(self._key("")): data for key, data in found.items() if data is not None}

    def add(self, name: str, data: bytes) -> bool:
        with ray_errors(f"note {name}"):
            # True where there is one already.
            return not internal_kv._internal_kv_put(self._key(name), data, overwrite=False, namespace=_TABLE)

    def remove(self, name: str) -> None:
        with ray_errors(f"remove {name}"):
            internal_kv._internal_kv_del(self._key(name), namespace=_TABLE)

    def _key(self, name: str) -> str:
        return f"{self.namespace}/{name}"
