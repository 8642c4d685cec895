"""Makes tiers from URLs. A library is imported only for a tier that needs it."""

import importlib
from dataclasses import replace

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers.coding import coding_of
from hybridkv.tiers.contract import Tier
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.encoded import EncodedTier

INJECT = "inject+"  # Before a scheme: tiers.fault_injection, which a release does not have.
LIBRARIES = {
    **dict.fromkeys(
        ("valkey", "valkeys", "valkey+unix", "redis", "rediss"), ("valkey.tier", "ValkeyTier")
    ),
    "s3": ("s3", "S3Tier"),
    "mooncake": ("mooncake.tier", "MooncakeTier"),
}
"""By the URL's scheme: (module, class). The module's first name is the extra's too."""


def make_tier(spec: TierSpec, node: str) -> Tier:
    """Returns a tier that is not open. `node` names this daemon in it. Raises ConfigError."""
    return EncodedTier(_make_bare(spec, node), coding_of(spec))


def _make_bare(spec: TierSpec, node: str) -> Tier:
    """Returns the tier without its encoding. Raises ConfigError."""
    if spec.kind.startswith(INJECT):
        return _make_injected(spec, node)
    if spec.kind == "disk":
        return DiskTier(spec, node)
    if spec.kind not in LIBRARIES:
        raise ConfigError(
            f"tier: {spec.kind!r} is none of disk, {', '.join(LIBRARIES)}",
            '"disk:///var/cache/hybridkv" works',
        )
    module, name = LIBRARIES[spec.kind]
    try:
        tier: Tier = getattr(importlib.import_module(f"hybridkv.tiers.{module}"), name)(spec)
    except ImportError as error:
        raise ConfigError(
            f"tier: {spec.kind} needs {error.name}",
            f"pip install 'hybridkv[{module.partition('.')[0]}]' works",
        ) from error
    return tier


def _make_injected(spec: TierSpec, node: str) -> Tier:
    """Returns the tier of the rest of the URL, with faults. Raises ConfigError in a release."""
    kind, location = spec.kind.removeprefix(INJECT), spec.location.removeprefix(INJECT)
    try:
        injection = importlib.import_module("hybridkv.tiers.fault_injection")
    except ImportError as error:
        raise ConfigError(
            f"tier: {INJECT} is for tests and not in a release", f'"{location}" works'
        ) from error
    own = injection.OPTIONS
    options = {name: value for name, value in spec.options.items() if name not in own}
    bare = _make_bare(replace(spec, kind=kind, location=location, options=options), node)
    tier: Tier = injection.InjectedTier(bare, spec)
    return tier
