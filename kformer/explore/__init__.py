"""Looking into models."""

from kformer.explore.maps import attention_maps, draw

__all__ = ["attention_maps", "draw"]
