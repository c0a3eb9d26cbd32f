"""Portolan: train mixture-of-experts language models in the open."""

__version__ = "0.1.0"
