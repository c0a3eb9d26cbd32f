"""The order of the stages, and which of them are already done."""
