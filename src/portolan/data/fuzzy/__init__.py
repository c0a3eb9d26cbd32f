"""Near-duplicates: MinHash proposes groups, exact containment decides, evidence remains."""
