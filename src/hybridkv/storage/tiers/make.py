"""From a tier's URL to the tier. Libraries are imported only for tiers that are used."""

import importlib
from dataclasses import replace

from hybridkv.core.errors import ConfigError
from hybridkv.core.tiers import TierSpec
from hybridkv.storage.tiers.base import Tier
from hybridkv.storage.tiers.disk import DiskTier
from hybridkv.storage.tiers.injected import OPTIONS, InjectedTier

INJECT = "inject+"
"""Before a scheme: see injected.py."""
LIBRARIES = {
    **dict.fromkeys(("valkey", "valkeys", "valkey+unix", "redis", "rediss"), ("valkey", "ValkeyTier")),
    "s3": ("s3", "S3Tier"),
    "mooncake": ("mooncake", "MooncakeTier"),
}
"""By the URL's scheme: the module, imported where it is used, which is also the name of the extra; and the class."""


def make_tier(spec: TierSpec, node: str) -> Tier:
    """The tier, not opened yet; raises ConfigError. `node` names this daemon among all that use it."""
    if spec.kind.startswith(INJECT):
        options = {name: value for name, value in spec.options.items() if name not in OPTIONS}
        kind, location = spec.kind.removeprefix(INJECT), spec.location.removeprefix(INJECT)
        return InjectedTier(make_tier(replace(spec, kind=kind, location=location, options=options), node), spec)
    if spec.kind == "disk":
        return DiskTier(spec, node)
    if spec.kind not in LIBRARIES:
        raise ConfigError(
            f'tier: {spec.kind!r} is none of disk, {", ".join(LIBRARIES)}; "disk:///var/cache/hybridkv" works'
        )
    module, name = LIBRARIES[spec.kind]
    try:
        made: Tier = getattr(importlib.import_module(f"hybridkv.storage.tiers.{module}"), name)(spec)
    except ImportError as error:
        raise ConfigError(f"tier: {spec.kind} needs {error.name}; pip install 'hybridkv[{module}]' works") from error
    return made
