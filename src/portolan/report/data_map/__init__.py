"""The pages of the corpus: overview map, duplicates, decontamination, mixture, terms, stages."""

from portolan.report.data_map.pages import INDEX, QUOTING, write_map

MAP = "map"
"""Folder of the pages below `site/`."""

__all__ = ["INDEX", "MAP", "QUOTING", "write_map"]
