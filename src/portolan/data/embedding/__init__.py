"""Documents as vectors: embedders, their fit to a corpus, and the attribute `embedding`."""
