"""Looking into models."""

from kformer.explorer.maps import attention_maps, draw

__all__ = ["attention_maps", "draw"]
