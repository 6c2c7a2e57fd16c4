"""From a scheduled function to a linked library: compilers in processes of their own, and what they made before."""
