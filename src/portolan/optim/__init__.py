"""Norm-constrained optimizer: parameter groups, update rule, rates."""
