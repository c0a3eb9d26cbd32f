"""Whether a run is well: rules over its signals, the checklist, and the shapes of its rungs."""
