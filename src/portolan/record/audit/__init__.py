"""Reconciliation: figures that were claimed, registered, configured, launched, observed."""
