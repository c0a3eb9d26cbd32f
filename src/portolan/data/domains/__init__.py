"""Domains: fine clusters of documents, made coarse, with names, and the attribute `domain`."""
