"""What comes out of a sweep: its document, comparisons, and one point as a script or a stanza."""
