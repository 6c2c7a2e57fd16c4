"""A sweep's document, comparisons, and a point as a script or nvpmodel stanza."""
