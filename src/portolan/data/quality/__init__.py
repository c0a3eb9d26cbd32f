"""Quality: labels by a rubric, a scorer that learnt them, calibration by type, five buckets."""
