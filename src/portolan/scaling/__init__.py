"""Ladder of small runs, forecast of a large one, its registration and its score."""
