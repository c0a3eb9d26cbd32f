"""The report of a project: one static page that needs no network."""

from portolan.report.site import build_site

__all__ = ["build_site"]
