"""Which pooling gives sets and series their natural labels: molecules, pictures, recordings."""
