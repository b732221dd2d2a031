"""Will it scale? Small variants of an architecture."""

from stackwise.prototype.shrink import SmallVariant, create_small_variant

__all__ = ["SmallVariant", "create_small_variant"]
