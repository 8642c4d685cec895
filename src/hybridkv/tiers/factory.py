"""Makes tiers from URLs. A library is imported only for a tier that needs it."""

import importlib
from dataclasses import replace

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers.coding import coding_of
from hybridkv.tiers.contract import Tier
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.fault_injection import OPTIONS, InjectedTier

INJECT = "inject+"  # Before a scheme: see fault_injection.
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
        options = {name: value for name, value in spec.options.items() if name not in OPTIONS}
        kind, location = spec.kind.removeprefix(INJECT), spec.location.removeprefix(INJECT)
        return InjectedTier(
            _make_bare(replace(spec, kind=kind, location=location, options=options), node), spec
        )
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
