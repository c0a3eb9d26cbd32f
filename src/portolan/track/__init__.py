"""Metrics on local disk, and bounded queues in front of remote trackers."""
