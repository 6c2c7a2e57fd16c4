"""Read and check board types, core types and fleet files. The data is in the top-level `inventory/` folder."""
