"""Runs that another tracker recorded, read into the same files as our own."""
