"""Decontamination: test items that stand in training text, found by 13-token windows."""
