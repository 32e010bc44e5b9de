"""Orders about keys as changes of their registry. Pure."""

from __future__ import annotations

from dynamo_local.core.keys.checks import DEFAULT_OVERLAP_S, check_overlap, read_terms
from dynamo_local.core.keys.registry import KeyRegistry, create_key, revoke_key, rotate_key
from dynamo_local.core.keys.values import ApiKey, KeyTerms, digest_of
from dynamo_local.core.messages.keys import CreateKey, KeyView, RevokeKey, RotateKey


def name_in(order: CreateKey | RotateKey | RevokeKey, now: float) -> str:
    """The name of the key that is ordered. Raises ConfigError for fields that are no key."""
    return read_terms(order.fields, now).name if isinstance(order, CreateKey) else order.name


def changed(registry: KeyRegistry, order: CreateKey | RotateKey | RevokeKey, secret: str, now: float) -> KeyRegistry:
    """The registry after an order. `secret`: a new one, which a revocation has no use for. Raises UsageError."""
    digest = digest_of(secret.encode())
    if isinstance(order, CreateKey):
        return create_key(registry, read_terms(order.fields, now), digest, now)
    if isinstance(order, RotateKey):
        overlap_s = DEFAULT_OVERLAP_S if order.overlap_s is None else check_overlap(order.overlap_s)
        return rotate_key(registry, order.name, digest, overlap_s, now)
    return revoke_key(registry, order.name, opens=order.opens)


def told(order: CreateKey | RotateKey | RevokeKey, after: KeyRegistry, name: str) -> str:
    """What has happened to the key, for the log of events."""
    if isinstance(order, RevokeKey):
        return f"key {name} revoked" + ("; no key is left, the server answers everybody" if not after.keys else "")
    key = after.key(name)
    if isinstance(order, CreateKey):
        return f"key {name} created" + (", of an administrator" if key.admin else "")
    return f"key {name} rotated"


def view_of(key: ApiKey, now: float) -> KeyView:
    """The key as it is shown."""
    former = key.former
    return KeyView(
        **{field: getattr(key, field) for field in KeyTerms.__struct_fields__},
        created_at=key.created_at,
        former_until=None if former is None or now >= former.valid_until else former.valid_until,
    )
