"""Makes tiers from URLs. A tier is a plug-in: the entry point of its URL's scheme names its class.

An entry point of the group `hybridkv.tiers` has the scheme as its name and MODULE:CLASS as its
value. The option `class=` of a URL does the same for a scheme that no installed package registers.
Nothing is imported but the class of a tier that is made. docs/tiers-of-your-own.md is the page.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from hybridkv.core.errors import ConfigError
from hybridkv.core.option_parsers import did_you_mean
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers.coding import coding_of
from hybridkv.tiers.contract import Tier
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.foreign import ForeignTier

GROUP = "hybridkv.tiers"
OURS = ("hybridkv", "hybridkv_fault_injection")
"""Packages whose tiers the daemon's loop may ask. Only a checkout has the second, for tests."""


def make_tier(spec: TierSpec, node: str) -> Tier:
    """Returns a tier that is not open. `node` names this daemon in it. Raises ConfigError."""
    return EncodedTier(make_plain_tier(replace(spec, node=node)), coding_of(spec))


def make_plain_tier(spec: TierSpec) -> Tier:
    """Returns the tier without its encoding. Raises ConfigError."""
    entry = _entry_point(spec)
    where = f"tier {spec.shown}"
    try:
        tier_class = entry.load()
    except Exception as error:  # It is the code of any package.
        what = f"{where}: {entry.value} cannot be loaded ({type(error).__name__}: {error})"
        raise ConfigError(what, _remedy(entry)) from error
    if not (isinstance(tier_class, type) and issubclass(tier_class, Tier)):
        what = f"{where}: {entry.value} is no subclass of hybridkv.tiers.contract.Tier"
        raise ConfigError(what, "one that is works")
    is_ours = tier_class.__module__.partition(".")[0] in OURS
    try:
        make: Callable[[TierSpec], Tier] = tier_class
        tier = make(spec)
    except ConfigError:
        raise
    except Exception as error:
        if is_ours:
            raise
        what = f"{where}: {entry.value} raises {type(error).__name__}: {error}"
        raise ConfigError(what, "a class that is made from a TierSpec works") from error
    return tier if is_ours else ForeignTier(tier)


def registered_schemes() -> dict[str, list[EntryPoint]]:
    """Returns the entry points of all installed tiers by scheme. More than one is a conflict."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def _entry_point(spec: TierSpec) -> EntryPoint:
    """Returns what names the tier's class. Raises ConfigError unless it is one thing alone."""
    registered = registered_schemes()
    entries = registered.get(spec.kind, [])
    if spec.class_path and not entries:
        return EntryPoint(name=spec.kind, value=spec.class_path, group=GROUP)
    packages = " and ".join(sorted(_package_of(entry) for entry in entries))
    if spec.class_path:
        what = f"tier {spec.shown}: the scheme {spec.kind!r} is registered by {packages}"
        raise ConfigError(what, f"my-{spec.kind}://... with class={spec.class_path} works")
    if not entries:
        hint = did_you_mean(spec.kind, registered, f"{', '.join(sorted(registered))} work")
        raise ConfigError(f"tier: no installed package registers the scheme {spec.kind!r}", hint)
    if len(entries) > 1:
        what = f"tier: the scheme {spec.kind!r} is registered by {packages}"
        raise ConfigError(what, "with one of them installed it works")
    return entries[0]


def _package_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"


def _remedy(entry: EntryPoint) -> str:
    """Returns what makes a class loadable that cannot be loaded."""
    if entry.dist is None:
        return "a module that is installed or on PYTHONPATH works"
    extras = f"[{','.join(entry.extras)}]" if entry.extras else ""
    return f"pip install '{entry.dist.name}{extras}' works"
