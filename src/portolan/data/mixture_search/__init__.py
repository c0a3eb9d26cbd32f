"""Search for a mixture over the results of small runs: objective, surrogate, candidates."""
